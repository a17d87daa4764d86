"""Small steps of attention: made on the host, run by a kernel family, held against formulas.

A step is random and the same in every run. It goes through the plugin's own code: masks by
`MaskPlan` and `MaskCache`, metadata as layers get it, and the two verbs of the kernel family.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from vllm_npu_prep.attention.families import KernelFamily
from vllm_npu_prep.attention.kernels import AttentionCall, AttentionKernels, LayerShape
from vllm_npu_prep.attention.mask_cache import MaskCache
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.mask import plan_mask
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.outcome import Outcome, worst_of
from vllm_npu_prep.verify.row import FILLER, compare, normal
from vllm_npu_prep.wording import counted

MASK_BYTES = 256 << 20
"""Budget of dense masks, which these steps never reach."""

LONGEST_WINDOW = 8192
"""Windows up to this many tokens are probed with sequences that reach past them. Larger ones are
probed with shorter sequences, which show the form but not the limit."""

PROMPTS = ((0, 5), (0, 1), (0, 130), (0, 4))
DECODES = ((5, 1), (140, 1), (127, 1), (128, 1), (0, 1))
CHUNKS = ((5, 1), (150, 1), (0, 23), (12, 8), (200, 70))
"""Tokens in the cache, and query tokens in this step, of each request."""


class PagedForm:
    """What every step over a paged cache depends on.

    Attributes
    ----------
    num_padding
        Number of padding requests of a full graph. Each has one token, and is attended to at a
        length of `padding_len` over the null block.
    """

    # For each request the tokens in the cache before the step, and its tokens in the step
    lengths: tuple[tuple[int, int], ...]
    block_size: int  # size of a block in tokens; 0 means that there is no cache
    causal: bool = True  # false for an encoder, over K and V of the step alone
    num_padding: int = 0
    padding_len: int = 1

    @property
    def contexts(self) -> list[int]:
        return [context for context, _ in self.lengths]

    @property
    def query_lens(self) -> list[int]:
        return [query for _, query in self.lengths]

    @property
    def seq_lens(self) -> list[int]:
        return [context + query for context, query in self.lengths]


class PagedStep:
    """A step whose requests have blocks of their own, in random order; block 0 is the null block.

    Attributes
    ----------
    num_blocks
        Number of blocks of the cache, the last of which is nobody's.
    table
        int32 ``[requests and padding requests, width]``, on the host.
    """

    form: PagedForm
    device: torch.device

    def place_in_blocks(
        self,
        generator: torch.Generator,
        num_blocks: int | None = None,
        table_width: int | None = None,
    ) -> None:
        """Give each request its blocks: as many as it needs, of as many as all need together."""
        form = self.form
        counts = [-(-n // form.block_size) for n in form.seq_lens] if form.block_size else []
        # As many as all rows of the table name together: the documentation demands it
        self.num_blocks = num_blocks or sum(counts) + form.num_padding + 2
        owned = iter((torch.randperm(self.num_blocks - 1, generator=generator) + 1).tolist())
        width = table_width or max(counts, default=1) + 1
        self.table = np.zeros((len(form.lengths) + form.num_padding, width), np.int32)
        for request, count in enumerate(counts):
            self.table[request, :count] = [next(owned) for _ in range(count)]

    def slots_of(self, positions: Sequence[range]) -> list[int]:
        """Return the slots in the KV cache of some positions of each request."""
        size = self.form.block_size
        return [
            int(self.table[request, position // size]) * size + position % size
            for request, some in enumerate(positions)
            for position in some
        ]

    @property
    def slots(self) -> list[int]:
        """The slot of each token of the step, -1 for padding."""
        own = [range(context, context + query) for context, query in self.form.lengths]
        return self.slots_of(own) + [-1] * self.form.num_padding

    def own_rows(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what the step's own tokens have, ``[num_tokens, ...]``, of lists by request."""
        return torch.cat([r[context:] for r, context in zip(rows, self.form.contexts)])

    def put(self, array: torch.Tensor | np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array).to(self.device)

    def metadata_with(
        self, state: AttentionState, mask: torch.Tensor | None, window: int | None = None
    ) -> AscendMetadata:
        """Return the step's metadata as layers get it; `mask` is on the device."""
        form = self.form
        query_lens = np.array(form.query_lens + [1] * form.num_padding, np.int32)
        seq_lens = np.array(form.seq_lens + [form.padding_len] * form.num_padding, np.int32)
        starts = np.concatenate([[0], query_lens.cumsum()]).astype(np.int32)
        has_cache = form.block_size > 0
        return AscendMetadata(
            attn_state=state,
            attn_mask=mask,
            block_tables=self.put(self.table) if has_cache else None,
            slot_mapping=self.put(np.array(self.slots, np.int32)) if has_cache else None,
            query_start_loc=self.put(starts),
            query_start_loc_np=starts,
            seq_lens=self.put(seq_lens),
            seq_lens_np=seq_lens,
            num_computed_tokens=self.put(np.array(form.contexts, np.int32)),
            num_reqs=len(form.lengths),
            max_query_len=max(form.query_lens),
            max_seq_len=max(form.seq_lens),
            num_actual_tokens=sum(form.query_lens),
            num_input_tokens=int(starts[-1]),
            sliding_window=window,
            causal=form.causal,
            in_full_graph=form.num_padding > 0,
        )


@dataclass(frozen=True)
class AttentionForm(PagedForm):
    """One form in which the plugin calls attention.

    Attributes
    ----------
    reads_cache_only
        Whether kernels don't get the step's own K and V, as in layers that share those of another
        layer.
    """

    state: AttentionState
    lengths: tuple[tuple[int, int], ...]
    layer: LayerShape
    dtype: torch.dtype
    block_size: int = 128
    window: int | None = None  # sliding window in tokens
    causal: bool = True
    num_padding: int = 0
    padding_len: int = 1
    num_shared: int = 0  # number of leading blocks that all requests share
    reads_cache_only: bool = False

    def __str__(self) -> str:
        context, queries = max(self.contexts), self.query_lens
        tokens = f"{min(queries)} to {max(queries)}" if len(set(queries)) > 1 else f"{queries[0]}"
        parts = [
            f"{counted(len(self.lengths), 'request')} of {tokens} token{'s' * (tokens != '1')}",
            f"up to {context} cached" if context else "nothing cached",
            str(self.dtype).removeprefix("torch."),
            f"{self.layer.num_heads}/{self.layer.num_kv_heads} heads of {self.layer.head_size}",
        ]
        parts += [f"blocks of {self.block_size}"] * bool(self.block_size)
        parts += [f"window {self.window}"] * (self.window is not None)
        parts += ["both ways"] * (not self.causal)
        if self.num_padding:
            rows = counted(self.num_padding, "padding request")
            parts.append(f"{rows} of length {self.padding_len}")
        if self.num_shared:
            parts.append(f"first {counted(self.num_shared, 'block')} shared")
        return ", ".join(parts)


def layer_of(num_heads: int, num_kv_heads: int, head_size: int) -> LayerShape:
    """Return a layer with the usual scale, one over the square root of the head size."""
    return LayerShape(num_heads, num_kv_heads, head_size, 1 / math.sqrt(head_size))


class AttentionStep(PagedStep):
    """A random step of one form on a device.

    Parameters
    ----------
    seed
        Steps with other seeds have other values and blocks.
    num_blocks, table_width
        Blocks of the cache, and columns of the block table, for steps that take turns in the same
        tensors; with None there are as many as this step needs, and one more.

    Attributes
    ----------
    queries, keys, values
        Lists by request, on the host: ``[query_len, num_heads, head_size]``, and twice ``[seq_len,
        num_kv_heads, head_size]``.
    kv_cache
        ``[2, num_blocks, block_size, num_kv_heads, head_size]`` on the device, without the step's
        own tokens.
    """

    form: AttentionForm

    def __init__(
        self,
        form: AttentionForm,
        device: torch.device,
        kernels: AttentionKernels,
        seed: int = 0,
        num_blocks: int | None = None,
        table_width: int | None = None,
    ) -> None:
        self.form, self.device, self.kernels = form, device, kernels
        generator, layer = torch.Generator().manual_seed(1 + seed), form.layer
        draw = partial(normal, generator, dtype=form.dtype)
        self.queries = [draw(n, layer.num_heads, layer.head_size) for n in form.query_lens]
        self.keys, self.values = (
            [draw(n, layer.num_kv_heads, layer.head_size) for n in form.seq_lens] for _ in range(2)
        )
        self.place_in_blocks(generator, num_blocks, table_width)
        if form.num_shared:  # all requests begin with the first one's blocks, and its K and V
            shared = form.num_shared
            self.table[: len(form.lengths), :shared] = self.table[0, :shared]
            for first, *others in (self.keys, self.values):
                for rows in others:
                    rows[: shared * form.block_size] = first[: shared * form.block_size]
        self.host_cache = self.cache_of_every(1, 0)
        self.kv_cache = self.host_cache.to(device, copy=True)

    def cache_of_every(self, nth: int, first: int) -> torch.Tensor:
        """Make a cache on the host with every n-th token of the contexts, from token `first` on.

        The tokens are packed one after another, as a rank of decode context parallelism keeps them.
        """
        form, layer = self.form, self.form.layer
        shape = (self.num_blocks, form.block_size or 1, layer.num_kv_heads, layer.head_size)
        empty = torch.full(shape, FILLER, dtype=form.dtype)
        if not form.block_size:
            return torch.stack([empty, empty])
        slots = self.slots_of([range(len(range(first, end, nth))) for end in form.contexts])
        planes = []
        for plane in (self.keys, self.values):
            kept = torch.cat([rows[first:end:nth] for rows, end in zip(plane, form.contexts)])
            planes.append(formulas.paged_write(empty, kept, slots, form.block_size))
        return torch.stack(planes)

    # ----------------------------------------------------------------- what the kernels get

    @property
    def num_tokens(self) -> int:
        return sum(self.form.query_lens)

    def query(self) -> torch.Tensor:
        """Return ``[T, num_heads, head_size]`` on the device, padding included."""
        return self._padded(torch.cat(self.queries))

    def own(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Return the step's own K or V, ``[T, num_kv_heads, head_size]`` on the device."""
        return self._padded(self.own_rows(rows))

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        padding = torch.ones(self.form.num_padding, *rows.shape[1:], dtype=rows.dtype)
        return torch.cat([rows, padding]).to(self.device)

    def metadata(self, masks: MaskCache | None = None) -> AscendMetadata:
        form, family = self.form, self.kernels.family
        plan = plan_mask(
            form.state,
            family.mask_forms[0],
            self.num_tokens + form.num_padding,
            max(form.seq_lens),
            sliding_window=form.window,
            causal=form.causal,
        )
        positions = np.concatenate([np.arange(c, c + n) for c, n in form.lengths])
        masks = masks or masks_for(family, form.dtype, self.device, max(form.seq_lens))
        mask = masks.build(plan, self.put(positions.astype(np.int64)))
        return self.metadata_with(form.state, mask, plan.sliding_window)

    # ----------------------------------------------------------------- run

    def write(self, metadata: AscendMetadata) -> None:
        """Write the step's own K and V, as a layer does before it attends."""
        if metadata.slot_mapping is not None:
            key, value = self.own(self.keys), self.own(self.values)
            self.kernels.write_kv(key, value, self.kv_cache, metadata.slot_mapping)

    def attend(self, metadata: AscendMetadata) -> torch.Tensor:
        """Attend: ``[T, num_heads, head_size]`` with padding; NaN where nothing was written."""
        query = self.query()
        output = torch.full_like(query, float("nan"))
        own = None
        if not self.form.reads_cache_only:
            own = self.own(self.keys), self.own(self.values)
        self.kernels.attend(query, own, self.kv_cache, metadata, self.form.layer, output)
        return output

    def call(self, name: str, output: torch.Tensor, query: torch.Tensor) -> AttentionCall:
        return AttentionCall(name, self.kernels, query, self.kv_cache, self.form.layer, output)

    # ----------------------------------------------------------------- what it has to give

    def expected_cache(self) -> torch.Tensor:
        own = [self.own(rows).cpu() for rows in (self.keys, self.values)]
        planes = [
            formulas.paged_write(plane, rows, self.slots, self.form.block_size)
            for plane, rows in zip(self.host_cache, own)
        ]
        return torch.stack(planes)

    def _formula(
        self, form: AttentionForm, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, lses = [], []
        for query, key, value in zip(self.queries, keys, values):
            seen = formulas.visible(len(query), len(key), form.window, form.causal)
            output, lse = formulas.attention(query, key, value, form.layer.scale, seen)
            outputs.append(output)
            lses.append(lse)
        return torch.cat(outputs), torch.cat(lses)

    def expected(self, **changed: object) -> torch.Tensor:
        """Compute the real tokens' attention by the formula, float64 ``[num_tokens, heads, size]``.

        `changed` attributes of the form give another reading of the call.
        """
        form = replace(self.form, **changed)  # type: ignore[arg-type]
        return self._formula(form, self.keys, self.values)[0]

    def expected_lse(self) -> torch.Tensor:
        """Compute the log-sum-exps, float64 ``[num_tokens, num_heads]``."""
        return self._formula(self.form, self.keys, self.values)[1]

    def readings(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Return functions for what a wrong result may look like, by what went wrong."""
        form = self.form
        found: dict[str, Callable[[], torch.Tensor]] = {
            "a plain average of the values": self._average,
            "without a scale": lambda: self.expected(layer=replace(form.layer, scale=1.0)),
        }
        if form.window is not None:
            for size in (form.window + 1, form.window - 1):
                found[f"a window of {size} tokens"] = partial(self.expected, window=size)
            found["no window"] = lambda: self.expected(window=None)
        if form.causal:
            found["no mask"] = lambda: self.expected(window=None, causal=False)
        if form.block_size and len(form.lengths) > 1:
            found["all requests over the first one's blocks"] = self._first_table_row
        return found

    def _average(self) -> torch.Tensor:
        return torch.cat(
            [formulas.uniform_average(q, v) for q, v in zip(self.queries, self.values)]
        )

    def _first_table_row(self) -> torch.Tensor:
        form, size = self.form, self.form.block_size
        positions = torch.arange(self.table.shape[1] * size)  # those past the row repeat its last
        blocks = torch.from_numpy(self.table[0]).long()
        keys, values = (
            plane[blocks[positions // size], positions % size] for plane in self.expected_cache()
        )
        read = [positions[:n].tolist() + [-1] * (n - len(positions)) for n in form.seq_lens]
        return self._formula(form, [keys[each] for each in read], [values[e] for e in read])[0]

    def check_attention(self, output: torch.Tensor) -> Outcome:
        expected = self.expected()
        return compare(
            output[: self.num_tokens], expected, str(self.form), readings=self.readings()
        )

    def check_cache(self) -> Outcome:
        """Compare every cell of the cache with what has to be there after `write`."""
        expected = self.expected_cache()
        readings = {"nothing written": lambda: self.host_cache}
        if -1 in self.slots:
            readings["a slot of -1 written to the last slot"] = self._last_slot_written
        return compare(
            self.kv_cache,
            expected,
            f"cache write of {self.form}",
            tolerance=0.0,
            readings=readings,
            where=("plane", "block", "slot", "head", "element"),
        )

    def _last_slot_written(self) -> torch.Tensor:
        cache = self.expected_cache()
        for plane, rows in zip(cache, (self.keys, self.values)):
            plane[-1, -1] = self.own(rows)[-1].cpu()
        return cache

    def run(self, masks: MaskCache | None = None) -> Outcome:
        metadata = self.metadata(masks)
        self.write(metadata)
        attended = self.check_attention(self.attend(metadata))
        if not self.form.block_size:
            return attended
        return worst_of([attended, self.check_cache()], str(self.form))


def forms_of(prompts: AttentionForm, with_padding: bool) -> dict[str, AttentionForm]:
    """Return a form of each kind of step of an engine, with lengths that show its limits.

    `with_padding` says whether full graphs will give attention padding requests.
    """
    if not prompts.block_size:
        return {"an encoder": prompts}
    reach, window = prompts.block_size - 1, prompts.window
    if window is not None and window <= LONGEST_WINDOW:
        reach = max(reach, window)
    decodes, chunks = ((reach + 2, 1), (2, 1)), ((reach, 3), (0, 4), (2, 1))
    return {
        "prompts": prompts,
        "decodes": replace(
            prompts,
            state=AttentionState.DecodeOnly,
            lengths=decodes,
            num_padding=int(with_padding),
        ),
        "chunks": replace(prompts, state=AttentionState.ChunkedPrefill, lengths=chunks),
    }


def masks_for(
    family: KernelFamily, dtype: torch.dtype, device: torch.device, max_seq_len: int
) -> MaskCache:
    """Make masks as a metadata builder makes them for the family."""
    return MaskCache(device, max_seq_len, MASK_BYTES, dtype, family.mask_values_of(dtype))
