"""Latent attention: steps through the plugin's kernels, held against a formula in float64.

Rows of ``verify-device`` run the same steps as the start-up of an engine.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from vllm_npu_prep.attention.kernels.latent import (
    LatentKernels,
    LatentShape,
    Projected,
    make_latent_kernels,
    planes_of,
    with_heads,
)
from vllm_npu_prep.attention.latent import LatentArrays, split_metadata
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.attention.mla import attend_prefills, split_common
from vllm_npu_prep.prep.latent_split import LatentSplit
from vllm_npu_prep.prep.mask import compressed_mask
from vllm_npu_prep.prep.state import AttentionState, attention_state, batch_flags
from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.outcome import Outcome, worst_of
from vllm_npu_prep.verify.row import (
    DTYPES,
    FILLER,
    Row,
    RowContext,
    compare,
    normal,
)
from vllm_npu_prep.verify.steps import PagedForm, PagedStep


@dataclass(frozen=True)
class LatentForm(PagedForm):
    """What a step of latent attention depends on."""

    lengths: tuple[tuple[int, int], ...]
    shape: LatentShape  # the layer's sizes on this rank
    dtype: torch.dtype
    block_size: int
    decode_threshold: int = 1  # requests with at most so many tokens come first, and are decodes
    workspace_blocks: int = 1  # number of blocks in a chunk of the context

    def __str__(self) -> str:
        heads = self.shape.num_heads
        return (
            f"{heads} heads, {str(self.dtype).removeprefix('torch.')}, blocks of "
            f"{self.block_size}, (cached, new) tokens {list(self.lengths)}"
        )


def shape_of(
    num_heads: int,
    kv_lora_rank: int = 512,
    rope: int = 64,
    size: int = 128,
    value_size: int | None = None,
) -> LatentShape:
    """Return a layer's constants; by default they are DeepSeek's but for the number of heads."""
    scale = 1 / math.sqrt(size + rope)
    return LatentShape(num_heads, kv_lora_rank, rope, size, value_size or size, scale)


class LatentStep(PagedStep):
    """A step with random queries and latent rows.

    The mask is the constant mask on the device.

    Attributes
    ----------
    latent, rope
        Lists by request, on the host: ``[seq_len, kv_lora_rank]`` and ``[seq_len,
        qk_rope_head_dim]``.
    query
        ``[num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]``, on the host.
    absorbed
        ``[num_tokens, num_heads, kv_lora_rank]``, on the host: the first part of queries as decodes
        have it.
    weight
        ``[kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim)]``, on the host: projects
        latent rows.
    planes
        The cache on the device, which is `kv_cache` before it is cut.
    """

    form: LatentForm

    def __init__(
        self,
        form: LatentForm,
        device: torch.device,
        kernels: LatentKernels,
        mask: torch.Tensor,
        seed: int = 0,
    ) -> None:
        self.form, self.kernels, self.device = form, kernels, device
        generator, shape = torch.Generator().manual_seed(seed), form.shape
        draw = partial(normal, generator, dtype=form.dtype)
        self.seq_lens, num_tokens = form.seq_lens, sum(form.query_lens)
        self.latent = [draw(n, shape.kv_lora_rank) for n in form.seq_lens]
        self.rope = [draw(n, shape.qk_rope_head_dim) for n in form.seq_lens]
        head = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        self.query = draw(num_tokens, shape.num_heads, head)
        self.absorbed = draw(num_tokens, shape.num_heads, shape.kv_lora_rank, scale=0.3)
        width = shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        self.weight = draw(shape.kv_lora_rank, width, scale=shape.kv_lora_rank**-0.5)
        self.place_in_blocks(generator)
        seq_lens, contexts, query_lens = map(
            np.array, (form.seq_lens, form.contexts, form.query_lens)
        )
        no_drafts = np.zeros(len(seq_lens), np.int32)
        state = attention_state(batch_flags(contexts, query_lens, no_drafts, seq_lens), True)
        self.metadata = self.metadata_with(
            state, None if state is AttentionState.DecodeOnly else mask
        )
        self.kv_cache = self.put(self._cache(form.contexts))
        self.planes = planes_of(self.kv_cache, shape)

    def _cache(self, lengths: list[int]) -> torch.Tensor:
        """Make a cache on the host that holds as many rows of each request, by the formula."""
        shape, size = self.form.shape, self.form.block_size
        page = size * (shape.kv_lora_rank + shape.qk_rope_head_dim)
        cache = torch.full((self.num_blocks, page), FILLER, dtype=self.form.dtype)
        slots = self.slots_of([range(length) for length in lengths])
        for plane, rows in zip(planes_of(cache, shape), (self.latent, self.rope)):
            kept = torch.cat([each[:length] for each, length in zip(rows, lengths)])
            plane.copy_(formulas.paged_write(plane, kept[:, None], slots, size))
        return cache

    def run(self) -> Outcome:
        form, shape = self.form, self.form.shape
        assert self.metadata.slot_mapping is not None
        latent, rope = (self.put(self.own_rows(rows)[:, None]) for rows in (self.latent, self.rope))
        self.kernels.write(latent, rope, self.planes, self.metadata.slot_mapping)
        split = LatentSplit(
            form.decode_threshold,
            form.workspace_blocks * form.block_size,
            form.block_size,
            max(self.seq_lens),
        )
        num_decodes, host = split_common(self.metadata, split)
        decodes, outcomes = self.metadata, [self._compare_cache()]
        first = len(self.query)
        if num_decodes < len(form.lengths):
            on_device = LatentArrays(*(self.put(each) for each in host))
            halves = split_metadata(self.metadata, num_decodes, host, on_device)
            first = halves.prefills.first_token
            size = len(self.query) - first
            output = self.put(torch.zeros(size, shape.num_heads, shape.v_head_dim).to(form.dtype))
            sizes = [shape.qk_nope_head_dim, shape.qk_rope_head_dim]
            query, query_rope = self.put(self.query[first:]).split(sizes, -1)
            own = self._project(query, query_rope, latent[first:].flatten(1), rope[first:])
            attend_prefills(
                self.kernels,
                shape,
                self.planes,
                own,
                halves.prefills,
                self.metadata,
                output,
                self._project,
            )
            expected = [self._prefill(row) for row in range(num_decodes, len(form.lengths))]
            outcomes.append(compare(output, torch.cat(expected), str(form), tolerance=self._bound))
            if halves.decodes is not None:
                decodes = halves.decodes
        if num_decodes:
            output = self._attend_decodes(decodes, first)
            expected = [self._decode(row)[0] for row in range(num_decodes)]
            outcomes.append(compare(output, torch.cat(expected), str(form), tolerance=self._bound))
        return worst_of(outcomes, str(form))

    def run_with_lse(self) -> Outcome:
        """Attend over the tokens before the step without a mask, and compare the log-sum-exps, too.

        Decode context parallelism asks for both.
        """
        form, heads = self.form, self.form.shape.num_heads
        lens = form.contexts
        metadata = replace(
            self.metadata,
            attn_mask=None,
            seq_lens=self.put(np.array(lens, np.int32)),
            seq_lens_np=np.array(lens, np.int32),
            max_seq_len=max(lens),
            causal=False,
            kernel_plan=None,
        )
        padded = self.kernels.decode_heads(heads)
        lse = self.put(torch.full((len(self.query), padded), float("nan")))
        output = self._attend_decodes(metadata, len(self.query), lse)
        outputs, lses = zip(*(self._decode(row, lens[row]) for row in range(len(lens))))
        what = f"{form}, with log-sum-exp"
        found = [
            compare(output, torch.cat(outputs), what, tolerance=self._bound),
            compare(lse[:, :heads], torch.cat(lses), f"softmax_lse of {what}", tolerance=2e-2),
        ]
        return worst_of(found, what)

    def _attend_decodes(
        self, decodes: AscendMetadata, num_tokens: int, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend over latent rows, ``[num_tokens, num_heads, kv_lora_rank]``."""
        shape = self.form.shape
        heads = self.kernels.decode_heads(shape.num_heads)
        rotated = self.query[:num_tokens, :, shape.qk_nope_head_dim :]
        query, query_rope = (
            with_heads(self.put(part), heads) for part in (self.absorbed[:num_tokens], rotated)
        )
        output, padded = torch.zeros_like(query), shape._replace(num_heads=heads)
        given = query, query_rope, self.planes, decodes, padded, output
        self.kernels.attend_latent(*given, lse=lse)
        return output[:, : shape.num_heads]

    @property
    def _bound(self) -> float | None:
        """Tolerance of attention; None is the usual one.

        Results below float32 have a wider one: probabilities and merged results are rounded between
        the parts of a step.
        """
        return None if self.form.dtype is torch.float32 else 0.03

    def _project(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
    ) -> Projected:
        shape = self.form.shape
        projected = (latent @ self.put(self.weight)).unflatten(1, (shape.num_heads, -1))
        key, value = projected.split([shape.qk_nope_head_dim, shape.v_head_dim], -1)
        return Projected(query, query_rope, key, rope, value)

    def _compare_cache(self) -> Outcome:
        wanted = planes_of(self._cache(self.seq_lens), self.form.shape)
        outcomes = [
            compare(plane, each.double(), "the cache", tolerance=0.0)
            for plane, each in zip(self.planes, wanted)
        ]
        return worst_of(outcomes, "the cache")

    def _tokens(self, row: int) -> slice:
        return slice(*self.metadata.query_start_loc_np[row : row + 2])

    def _prefill(self, row: int) -> torch.Tensor:
        shape, (_, count) = self.form.shape, self.form.lengths[row]
        projected = (self.latent[row].double() @ self.weight.double()).unflatten(
            1, (shape.num_heads, -1)
        )
        key, value = projected.split([shape.qk_nope_head_dim, shape.v_head_dim], -1)
        rope = self.rope[row].double().unsqueeze(1).expand(-1, shape.num_heads, -1)
        query = self.query[self._tokens(row)]
        seen = formulas.visible(count, self.seq_lens[row])
        return formulas.attention(query, torch.cat((key, rope), -1), value, shape.scale, seen)[0]

    def _decode(self, row: int, num_seen: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a request's result and log-sum-exp by the formula.

        Tokens attend causally, or all of them over the first `num_seen` tokens.
        """
        shape, (_, count) = self.form.shape, self.form.lengths[row]
        tokens = self._tokens(row)
        rotated = self.query[tokens, :, shape.qk_nope_head_dim :]
        query = torch.cat((self.absorbed[tokens], rotated), -1)
        key = torch.cat((self.latent[row], self.rope[row]), -1).unsqueeze(1)
        value, seen = self.latent[row].unsqueeze(1), formulas.visible(count, self.seq_lens[row])
        if num_seen is not None:
            key, value = key[:num_seen], value[:num_seen]
            seen = torch.ones(count, num_seen, dtype=torch.bool)
        return formulas.attention(query, key, value, shape.scale, seen)


def forms_of(
    shape: LatentShape, dtype: torch.dtype, block_size: int, decode_query_len: int = 1
) -> dict[str, LatentForm]:
    """Return a form of each kind of step of an engine, with lengths that show its limits."""
    reach = block_size - 1
    base = LatentForm(((reach + 2, 1), (2, 1)), shape, dtype, block_size)
    mixed = (reach, 1), (2 * block_size + 3, 4), (3, 5), (0, 4)
    forms = {
        "decodes over latent rows": base,
        "prefills over projected rows": LatentForm(mixed, shape, dtype, block_size),
    }
    if decode_query_len > 1:
        lengths = (reach, decode_query_len), (4, decode_query_len)
        forms["drafts over latent rows"] = LatentForm(
            lengths, shape, dtype, block_size, decode_query_len
        )
    return forms


WHAT = {
    "decode": "decodes over latent rows",
    "drafts": "drafts over latent rows",
    "prefill": "prefills over projected rows",
}
"""The form of a step, by the name of its rows."""


USUAL = shape_of(4)
WIDE = shape_of(5, size=192, value_size=256)
"""The shape of GLM-4.7-Flash: the number of heads is no power of two; values are as wide as keys
with their rotated part."""


def _step(what: str, shape: LatentShape, dtype: torch.dtype, context: RowContext) -> LatentStep:
    form, mask = forms_of(shape, dtype, 128, 3)[what], torch.from_numpy(compressed_mask())
    kernels = make_latent_kernels("fia")
    return LatentStep(form, context.device.device, kernels, context.put(mask))


def _run(what: str, shape: LatentShape, dtype: torch.dtype, context: RowContext) -> Outcome:
    return _step(what, shape, dtype, context).run()


def _run_with_lse(dtype: torch.dtype, context: RowContext) -> Outcome:
    return _step("drafts over latent rows", USUAL, dtype, context).run_with_lse()


def _row(name: str, short: str, shape: LatentShape, instead: str = "") -> Row:
    what, is_wide = WHAT[name], shape is WIDE
    return Row(
        f"latent-{'wide-' * is_wide}{name}-{short}",
        f"latent attention{', heads of 192 and 256' * is_wide}: {what}",
        partial(_run, what, shape, DTYPES[short]),
        instead=instead,
    )


ROWS = (
    *(
        _row(name, short, USUAL, "use bfloat16" * (name == "prefill" and short == "fp16"))
        for name in WHAT
        for short in DTYPES
    ),
    *(
        Row(
            f"latent-lse-{short}",
            "latent attention: tokens over latent rows, softmax_lse asked for",
            partial(_run_with_lse, dtype),
        )
        for short, dtype in DTYPES.items()
    ),
    _row("drafts", "bf16", WIDE),
    _row("prefill", "bf16", WIDE, "use another model, or CANN 9.0 or newer"),
)
