"""Small steps of attention: made on the host, run by a kernel family, held against formulas.

A step is random and the same in every run. It goes through the plugin's own code: masks by
`MaskPlan` and `MaskCache`, metadata as layers get it, and the two verbs of the kernel family.
"""

import math
from collections.abc import Callable
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
from vllm_npu_prep.verify.row import FILLER, compare
from vllm_npu_prep.wording import counted

MASK_BYTES = 256 << 20
"""Budget of dense masks, which these steps never reach."""

PROMPTS = ((0, 5), (0, 1), (0, 130), (0, 4))
DECODES = ((5, 1), (140, 1), (127, 1), (128, 1), (0, 1))
CHUNKS = ((5, 1), (150, 1), (0, 23), (12, 8), (200, 70))
"""Tokens in the cache, and query tokens in this step, of each request."""


@dataclass(frozen=True)
class AttentionForm:
    """One form in which the plugin calls attention.

    Attributes
    ----------
    lengths
        For each request the tokens in the cache before the step, and its tokens in the step.
    block_size
        Size of a block in tokens; 0 means that there is no cache.
    window
        Sliding window in tokens.
    causal
        False for an encoder, over K and V of the step alone.
    num_padding
        Number of padding requests of a full graph. Each has one token, and is attended to at a
        length of `padding_len` over the null block.
    num_shared
        Number of leading blocks that all requests share.
    """

    state: AttentionState
    lengths: tuple[tuple[int, int], ...]
    layer: LayerShape
    dtype: torch.dtype
    block_size: int = 128
    window: int | None = None
    causal: bool = True
    num_padding: int = 0
    padding_len: int = 1
    num_shared: int = 0

    def __str__(self) -> str:
        context = max(context for context, _ in self.lengths)
        queries = [query for _, query in self.lengths]
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

    @property
    def query_lens(self) -> list[int]:
        return [query for _, query in self.lengths]

    @property
    def seq_lens(self) -> list[int]:
        return [context + query for context, query in self.lengths]


def layer_of(num_heads: int, num_kv_heads: int, head_size: int) -> LayerShape:
    """Return a layer with the usual scale, one over the square root of the head size."""
    return LayerShape(num_heads, num_kv_heads, head_size, 1 / math.sqrt(head_size))


class AttentionStep:
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
        self._generator = torch.Generator().manual_seed(1 + seed)
        layer = form.layer
        self.queries = [self._random(n, layer.num_heads, layer.head_size) for n in form.query_lens]
        self.keys = self._rows()
        self.values = self._rows()
        self._place_in_blocks(num_blocks, table_width)
        self._share()
        self.host_cache = self._cache()
        self.kv_cache = self.host_cache.to(device, copy=True)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.form.dtype)

    def _rows(self) -> list[torch.Tensor]:
        layer = self.form.layer
        return [self._random(n, layer.num_kv_heads, layer.head_size) for n in self.form.seq_lens]

    def _place_in_blocks(self, num_blocks: int | None, table_width: int | None) -> None:
        """Give each request blocks of its own in random order; block 0 is the null block."""
        form = self.form
        size = form.block_size or 1
        counts = [-(-seq_len // size) for seq_len in form.seq_lens] if form.block_size else []
        # As many as all rows of the table name together: the documentation demands it
        self.num_blocks = num_blocks or sum(counts) + form.num_padding + 2
        owned = iter((torch.randperm(self.num_blocks - 1, generator=self._generator) + 1).tolist())
        width = table_width or max(counts, default=1) + 1
        self.table = np.zeros((len(form.lengths) + form.num_padding, width), np.int32)
        for request, count in enumerate(counts):
            self.table[request, :count] = [next(owned) for _ in range(count)]

    def _share(self) -> None:
        """Let all requests begin with the first one's blocks, and with its K and V."""
        num_shared = self.form.num_shared
        if not num_shared:
            return
        tokens = num_shared * self.form.block_size
        self.table[: len(self.form.lengths), :num_shared] = self.table[0, :num_shared]
        for rows in (self.keys, self.values):
            for each in rows[1:]:
                each[:tokens] = rows[0][:tokens]

    def _cache(self) -> torch.Tensor:
        """Make the cache on the host before the step: contexts, and large numbers elsewhere."""
        form, layer = self.form, self.form.layer
        shape = (2, self.num_blocks, form.block_size or 1, layer.num_kv_heads, layer.head_size)
        cache = torch.full(shape, FILLER, dtype=form.dtype)
        if form.block_size:
            for request, (context, _) in enumerate(form.lengths):
                for position in range(context):
                    block, offset = self._cell(request, position)
                    cache[0, block, offset] = self.keys[request][position]
                    cache[1, block, offset] = self.values[request][position]
        return cache

    def every(self, nth: int, first: int) -> torch.Tensor:
        """Make a cache on the host with every n-th token of the contexts, from token `first` on.

        The tokens are packed one after another, as a rank of decode context parallelism keeps them.
        """
        cache = torch.full_like(self.host_cache, FILLER)
        for request, (context, _) in enumerate(self.form.lengths):
            for place, position in enumerate(range(first, context, nth)):
                block, offset = self._cell(request, place)
                cache[0, block, offset] = self.keys[request][position]
                cache[1, block, offset] = self.values[request][position]
        return cache

    def _cell(self, request: int, position: int) -> tuple[int, int]:
        size = self.form.block_size
        return int(self.table[request, position // size]), position % size

    # ----------------------------------------------------------------- what the kernels get

    @property
    def num_tokens(self) -> int:
        return sum(self.form.query_lens)

    @property
    def slots(self) -> list[int]:
        """The slot in the KV cache of each token, -1 for padding."""
        slots = []
        for request, (context, query_len) in enumerate(self.form.lengths):
            for position in range(context, context + query_len):
                block, offset = self._cell(request, position)
                slots.append(block * self.form.block_size + offset)
        return slots + [-1] * self.form.num_padding

    def query(self) -> torch.Tensor:
        """Return ``[T, num_heads, head_size]`` on the device, padding included."""
        return self._padded(torch.cat(self.queries))

    def own(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Return the step's own K or V, ``[T, num_kv_heads, head_size]`` on the device."""
        return self._padded(torch.cat([r[c:] for r, (c, _) in zip(rows, self.form.lengths)]))

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        padding = torch.ones(self.form.num_padding, *rows.shape[1:], dtype=rows.dtype)
        return torch.cat([rows, padding]).to(self.device)

    def metadata(self, masks: MaskCache | None = None) -> AscendMetadata:
        form = self.form
        query_lens = np.array(form.query_lens + [1] * form.num_padding, np.int32)
        seq_lens = np.array(form.seq_lens + [form.padding_len] * form.num_padding, np.int32)
        starts = np.concatenate([[0], query_lens.cumsum()]).astype(np.int32)
        num_input_tokens, max_seq_len = int(starts[-1]), max(form.seq_lens)
        contexts = np.array([context for context, _ in form.lengths], np.int32)
        plan = plan_mask(
            form.state,
            self.kernels.family.mask_forms[0],
            num_input_tokens,
            max_seq_len,
            sliding_window=form.window,
            causal=form.causal,
        )
        positions = np.concatenate([np.arange(c, c + n) for c, n in form.lengths])
        masks = masks or masks_for(self.kernels.family, form.dtype, self.device, max_seq_len)
        return AscendMetadata(
            attn_state=form.state,
            attn_mask=masks.build(plan, self._to_device(positions.astype(np.int64))),
            block_tables=self._to_device(self.table) if form.block_size else None,
            slot_mapping=self._to_device(np.array(self.slots, np.int32))
            if form.block_size
            else None,
            query_start_loc=self._to_device(starts),
            query_start_loc_np=starts,
            seq_lens=self._to_device(seq_lens),
            seq_lens_np=seq_lens,
            num_computed_tokens=self._to_device(contexts),
            num_reqs=len(form.lengths),
            max_query_len=max(form.query_lens),
            max_seq_len=max_seq_len,
            num_actual_tokens=self.num_tokens,
            num_input_tokens=num_input_tokens,
            sliding_window=plan.sliding_window,
            causal=form.causal,
            in_full_graph=form.num_padding > 0,
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    # ----------------------------------------------------------------- run

    def write(self, metadata: AscendMetadata) -> None:
        """Write the step's own K and V, as a layer does before it attends."""
        if self.form.block_size:
            assert metadata.slot_mapping is not None
            key, value = self.own(self.keys), self.own(self.values)
            self.kernels.write_kv(key, value, self.kv_cache, metadata.slot_mapping)

    def attend(self, metadata: AscendMetadata, cache_only: bool = False) -> torch.Tensor:
        """Attend: ``[T, num_heads, head_size]``, padding included; NaN where nothing was written.

        With `cache_only` the kernels don't get the step's own K and V, as in layers that share
        those of another layer.
        """
        query = self.query()
        output = torch.full_like(query, float("nan"))
        self.kernels.attend(
            query,
            None if cache_only else self.own(self.keys),
            None if cache_only else self.own(self.values),
            self.kv_cache,
            metadata,
            self.form.layer,
            output,
        )
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

    def expected(self, **changed: object) -> torch.Tensor:
        """Compute the real tokens' attention by the formula, float64 ``[num_tokens, heads, size]``.

        `changed` attributes of the form give another reading of the call.
        """
        form = replace(self.form, **changed)  # type: ignore[arg-type]
        parts = []
        for query, key, value in zip(self.queries, self.keys, self.values):
            seen = formulas.visible(len(query), len(key), form.window, form.causal)
            parts.append(formulas.attention(query, key, value, form.layer.scale, seen)[0])
        return torch.cat(parts)

    def expected_lse(self) -> torch.Tensor:
        """Compute the log-sum-exps, float64 ``[num_tokens, num_heads]``."""
        form = self.form
        parts = []
        for query, key, value in zip(self.queries, self.keys, self.values):
            seen = formulas.visible(len(query), len(key), form.window, form.causal)
            parts.append(formulas.attention(query, key, value, form.layer.scale, seen)[1])
        return torch.cat(parts)

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
        form, cache = self.form, self.expected_cache()
        parts = []
        for query, seq_len in zip(self.queries, form.seq_lens):
            last = self.table.shape[1] * form.block_size - 1
            cells = [self._cell(0, min(position, last)) for position in range(seq_len)]
            key, value = (torch.stack([plane[b, o] for b, o in cells]) for plane in cache)
            seen = formulas.visible(len(query), seq_len, form.window, form.causal)
            parts.append(formulas.attention(query, key, value, form.layer.scale, seen)[0])
        return torch.cat(parts)

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

    def run(self, masks: MaskCache | None = None, cache_only: bool = False) -> Outcome:
        metadata = self.metadata(masks)
        self.write(metadata)
        output = self.attend(metadata, cache_only)
        attended = self.check_attention(output)
        if not self.form.block_size:
            return attended
        return worst_of([attended, self.check_cache()], str(self.form))


def masks_for(
    family: KernelFamily, dtype: torch.dtype, device: torch.device, max_seq_len: int
) -> MaskCache:
    """Make masks as a metadata builder makes them for the family."""
    values = family.mask_values
    return MaskCache(device, max_seq_len, MASK_BYTES, dtype, values[dtype] if values else None)
