"""Steps of latent attention through the plugin's kernels, held against a formula in float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_npu_prep.attention.kernels.latent import (
    LatentKernels,
    LatentShape,
    Planes,
    Projected,
    planes_of,
    with_heads,
)
from vllm_npu_prep.attention.latent import LatentArrays, split_metadata
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.attention.mla import attend_prefills, split_common
from vllm_npu_prep.prep.latent import LatentSplit
from vllm_npu_prep.prep.state import AttentionState, attention_state, batch_flags
from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.outcome import Outcome, worst_of
from vllm_npu_prep.verify.row import FILLER, compare


@dataclass(frozen=True)
class LatentForm:
    """What a step of latent attention depends on.

    Attributes
    ----------
    lengths
        For each request the tokens in the cache before the step, and its tokens in the step.
        Requests with at most `decode_threshold` tokens come first, and are decodes.
    shape
        The layer's sizes on this rank.
    block_size
        Size of a block in tokens.
    workspace_blocks
        Number of blocks in a chunk of the context.
    """

    lengths: tuple[tuple[int, int], ...]
    shape: LatentShape
    dtype: torch.dtype
    block_size: int
    decode_threshold: int = 1
    workspace_blocks: int = 1

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


class LatentStep:
    """A step with random queries and latent rows.

    The mask is the constant mask on the device.
    """

    def __init__(
        self,
        form: LatentForm,
        device: torch.device,
        kernels: LatentKernels,
        mask: torch.Tensor,
        seed: int = 0,
    ) -> None:
        self.form, self.kernels, self._device = form, kernels, device
        generator = torch.Generator().manual_seed(seed)
        shape = form.shape

        def random(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*sizes, generator=generator) * scale).to(form.dtype)

        cached, new = zip(*form.lengths)
        self.seq_lens = [a + b for a, b in form.lengths]
        self.latent = [random(n, shape.kv_lora_rank) for n in self.seq_lens]
        self.rope = [random(n, shape.qk_rope_head_dim) for n in self.seq_lens]
        head = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        self.query = random(sum(new), shape.num_heads, head)
        self.absorbed = random(sum(new), shape.num_heads, shape.kv_lora_rank, scale=0.3)
        width = shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        self.weight = random(shape.kv_lora_rank, width, scale=shape.kv_lora_rank**-0.5)
        self.starts = np.cumsum([0, *new]).astype(np.int32)
        self.metadata = self._metadata(cached, new, mask, generator)
        self.planes = self._cache()

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def _metadata(
        self,
        cached: Sequence[int],
        new: Sequence[int],
        mask: torch.Tensor,
        generator: torch.Generator,
    ) -> AscendMetadata:
        size = self.form.block_size
        needed = [-(-length // size) for length in self.seq_lens]
        self.num_blocks = sum(needed) + 2
        # Blocks of all requests in any order; block 0 and the last one are nobody's
        ids = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
        table = torch.zeros(len(needed), max(needed) + 1, dtype=torch.int32)
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
        self.table = table
        seq_lens = np.array(self.seq_lens, np.int32)
        slots = [
            int(table[row, position // size]) * size + position % size
            for row, (first, count) in enumerate(self.form.lengths)
            for position in range(first, first + count)
        ]
        no_drafts = np.zeros(len(new), np.int32)
        state = attention_state(
            batch_flags(np.array(cached), np.array(new), no_drafts, seq_lens), True
        )
        has_mask = state is not AttentionState.DecodeOnly
        return AscendMetadata(
            attn_state=state,
            attn_mask=mask if has_mask else None,
            block_tables=self._put(table),
            slot_mapping=self._put(torch.tensor(slots, dtype=torch.int32)),
            query_start_loc=self._put(torch.from_numpy(self.starts)),
            query_start_loc_np=self.starts,
            seq_lens=self._put(torch.from_numpy(seq_lens)),
            seq_lens_np=seq_lens,
            num_computed_tokens=self._put(torch.tensor(cached, dtype=torch.int32)),
            num_reqs=len(new),
            max_query_len=max(new),
            max_seq_len=max(self.seq_lens),
            num_actual_tokens=sum(new),
            num_input_tokens=sum(new),
        )

    def _cache(self) -> Planes:
        """Make the cache with every row that was there before the step."""
        shape, size = self.form.shape, self.form.block_size
        page = size * (shape.kv_lora_rank + shape.qk_rope_head_dim)
        host = torch.full((self.num_blocks, page), FILLER, dtype=self.form.dtype)
        planes = planes_of(host, shape)
        for row, (first, _) in enumerate(self.form.lengths):
            for position in range(first):
                block, offset = int(self.table[row, position // size]), position % size
                planes.latent[block, offset, 0] = self.latent[row][position]
                planes.rope[block, offset, 0] = self.rope[row][position]
        self.kv_cache = self._put(host)
        return planes_of(self.kv_cache, shape)

    def run(self) -> Outcome:
        form, shape = self.form, self.form.shape
        fresh = [
            torch.cat([rows[first:] for rows, (first, _) in zip(each, form.lengths)]).unsqueeze(1)
            for each in (self.latent, self.rope)
        ]
        assert self.metadata.slot_mapping is not None
        latent, rope = (self._put(rows) for rows in fresh)
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
            on_device = LatentArrays(*(self._put(torch.from_numpy(each)) for each in host))
            halves = split_metadata(self.metadata, num_decodes, host, on_device)
            first = halves.prefills.first_token
            size = len(self.query) - first
            output = self._put(torch.zeros(size, shape.num_heads, shape.v_head_dim).to(form.dtype))
            sizes = [shape.qk_nope_head_dim, shape.qk_rope_head_dim]
            query, query_rope = self._put(self.query[first:]).split(sizes, -1)
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
        lens = [first for first, _ in form.lengths]
        metadata = replace(
            self.metadata,
            attn_mask=None,
            seq_lens=self._put(torch.tensor(lens, dtype=torch.int32)),
            seq_lens_np=np.array(lens, np.int32),
            max_seq_len=max(lens),
            causal=False,
            kernel_plan=None,
        )
        padded = self.kernels.decode_heads(heads)
        lse = self._put(torch.full((len(self.query), padded), float("nan")))
        output = self._attend_decodes(metadata, len(self.query), lse)
        outputs, lses = zip(*(self._decode(row, lens[row]) for row in range(len(lens))))
        what = f"{form}, with sums of exponentials"
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
            with_heads(self._put(part), heads) for part in (self.absorbed[:num_tokens], rotated)
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
        projected = (latent @ self._put(self.weight)).unflatten(1, (shape.num_heads, -1))
        key, value = projected.split([shape.qk_nope_head_dim, shape.v_head_dim], -1)
        return Projected(query, query_rope, key, rope, value)

    def _compare_cache(self) -> Outcome:
        shape, size = self.form.shape, self.form.block_size
        page = size * (shape.kv_lora_rank + shape.qk_rope_head_dim)
        wanted = planes_of(torch.full((self.num_blocks, page), FILLER).to(self.form.dtype), shape)
        for row, length in enumerate(self.seq_lens):
            for position in range(length):
                block, offset = int(self.table[row, position // size]), position % size
                wanted.latent[block, offset, 0] = self.latent[row][position]
                wanted.rope[block, offset, 0] = self.rope[row][position]
        outcomes = [
            compare(plane, each.double(), "the cache", tolerance=0.0)
            for plane, each in zip(self.planes, wanted)
        ]
        return worst_of(outcomes, "the cache")

    def _prefill(self, row: int) -> torch.Tensor:
        shape, (_, count) = self.form.shape, self.form.lengths[row]
        projected = (self.latent[row].double() @ self.weight.double()).unflatten(
            1, (shape.num_heads, -1)
        )
        key, value = projected.split([shape.qk_nope_head_dim, shape.v_head_dim], -1)
        rope = self.rope[row].double().unsqueeze(1).expand(-1, shape.num_heads, -1)
        query = self.query[self.starts[row] : self.starts[row + 1]]
        seen = formulas.visible(count, self.seq_lens[row])
        return formulas.attention(query, torch.cat((key, rope), -1), value, shape.scale, seen)[0]

    def _decode(self, row: int, num_seen: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a request's result and log-sum-exp by the formula.

        Tokens attend causally, or all of them over the first `num_seen` tokens.
        """
        shape, (_, count) = self.form.shape, self.form.lengths[row]
        tokens = slice(self.starts[row], self.starts[row + 1])
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
