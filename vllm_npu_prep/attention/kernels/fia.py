"""The fused infer attention family (A2, A3): one operator for every state, and compressed masks.

Sources: the schema and docstring of ``torch_npu.npu_fused_infer_attention_score``; its use in the
TND layout with a block table follows what the Ascend community runs (the docstring is stricter;
this is to be confirmed on hardware). Encoders, which have no cache and no causal mask, call
``torch_npu.npu_fusion_attention``: the first operator was reported to give a uniform average
without a mask over fresh K and V (vllm-project/vllm-ascend 13699).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu

from vllm_npu_prep.attention.families import FIA
from vllm_npu_prep.attention.fused_releases import MAX_LENGTHS
from vllm_npu_prep.attention.kernels import AttentionCall, KeyValue, LayerShape
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.state import AttentionState

NO_MASK_MODE = 0  # sparse_mode without a mask
CAUSAL_MODE = 3  # rightDownCausal: the constant's diagonal lies on the lower right corner
BAND_MODE = 4  # the same with a lower limit, `pre_tokens` before the diagonal


MAX_ENCODED = 1024
"""The most requests of a call of ``npu_fusion_attention`` in TND (op-plugin's documentation)."""


@dataclass(frozen=True)
class Part:
    """Requests of a step that one call serves.

    Attributes
    ----------
    query_ends
        Cumulative query lengths, counted from the part's first token.
    requests, tokens
        The part's requests and tokens among those of the step; None for all.
    """

    query_ends: list[int]
    seq_lens: list[int]
    requests: slice | None = None
    tokens: slice | None = None


class FiaKernels:
    """`vllm_npu_prep.attention.kernels.AttentionKernels` on ``npu_fused_infer_attention_score``."""

    family = FIA
    workspace_serves_all_lengths = True

    def __init__(self, limits_batches: bool = False) -> None:
        self.limits_batches = limits_batches
        self._kv_cache: torch.Tensor | None = None
        self._no_lse: torch.Tensor | None = None

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write K and V. ``cache_mode`` is given because its default is the layout of 310P."""
        key_cache, value_cache = self._planes(kv_cache)
        torch_npu.npu_scatter_pa_kv_cache(
            key, value, key_cache, value_cache, slot_mapping, cache_mode="Norm"
        )

    def attend(
        self,
        query: torch.Tensor,
        own: KeyValue | None,
        kv_cache: torch.Tensor,
        metadata: AscendMetadata,
        layer: LayerShape,
        output: torch.Tensor,
        workspace: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend over the step's own K and V if nothing is cached, else over the cache."""
        if not metadata.causal and own is not None:
            assert lse is None, "encoders have no cache"
            _encode(query, own, metadata, layer, output)
            return
        if self._no_lse is None:
            self._no_lse = torch.empty(0, dtype=torch.float32, device=query.device)
        sums = self._no_lse if lse is None else lse.unsqueeze(-1)
        for part in self._parts(own, kv_cache, metadata):
            tokens = part.tokens
            torch_npu.npu_fused_infer_attention_score.out(
                query if tokens is None else query[tokens],
                **self._arguments(own, kv_cache, metadata, layer, part),
                softmax_lse_flag=lse is not None,
                workspace=workspace,
                out=[
                    output if tokens is None else output[tokens],
                    sums if tokens is None or lse is None else sums[tokens],
                ],
            )

    def workspace(self, call: AttentionCall, metadata: AscendMetadata) -> torch.Tensor:
        """Return a workspace for all lengths, in elements of the query's dtype."""
        return torch_npu._npu_fused_infer_attention_score_get_max_workspace(
            call.query,
            **self._arguments(None, call.kv_cache, metadata, call.layer, plan_of(metadata)[0]),
        )

    def working_bytes(self, layer: LayerShape, itemsize: int, max_seq_len: int) -> int:
        """Return 0: the operators read the cache in place."""
        return 0

    def _parts(
        self, own: KeyValue | None, kv_cache: torch.Tensor, metadata: AscendMetadata
    ) -> list[Part]:
        """Return the calls that serve a step, found once for all layers.

        A full graph has one call: `vllm_npu_prep.runner.padding` runs other steps eagerly.
        """
        unplanned = metadata.kernel_plan is None
        if unplanned and self.limits_batches and not metadata.in_full_graph:
            is_fresh = _is_fresh(own, metadata)
            sizes = () if is_fresh else self._planes(kv_cache)[0].shape[:2]
            metadata.kernel_plan = split(metadata, MAX_LENGTHS, *sizes)
        return plan_of(metadata)

    def _arguments(
        self,
        own: KeyValue | None,
        kv_cache: torch.Tensor,
        metadata: AscendMetadata,
        layer: LayerShape,
        part: Part,
    ) -> dict[str, Any]:
        """Return the arguments after the query.

        Lengths are host lists. Those of queries are cumulative. Those of K and V are cumulative for
        the step's own K and V, and one number per request for K and V in the cache.
        """
        paged: dict[str, Any] = {}
        if own is not None and _is_fresh(own, metadata):
            kv_lengths = part.query_ends
            key, value = own
            if part.tokens is not None:
                key, value = key[part.tokens], value[part.tokens]
        else:
            planes, table = self._planes(kv_cache), metadata.block_tables
            if part.requests is not None:
                assert table is not None
                table = table[part.requests]
            key, value = self._flat
            paged = {"block_table": table, "block_size": planes[0].shape[1]}
            kv_lengths = part.seq_lens
        return {
            "key": key,
            "value": value,
            "atten_mask": metadata.attn_mask,
            **_sparse_mode(metadata),
            "input_layout": "TND",
            "actual_seq_lengths": part.query_ends,
            "actual_seq_lengths_kv": kv_lengths,
            "num_heads": layer.num_heads,
            "num_key_value_heads": layer.num_kv_heads,
            "scale": layer.scale,
            **paged,
        }

    def _planes(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return K and V of a cache, ``[num_blocks, block_size, num_kv_heads, head_size]``."""
        if self._kv_cache is not kv_cache:  # views cost a device's host several microseconds each
            self._kv_cache, self._kv = kv_cache, kv_cache.unbind()
            self._flat = [plane.flatten(2) for plane in self._kv]
        return self._kv


def _sparse_mode(metadata: AscendMetadata) -> dict[str, int]:
    """Return how the kernel applies the constant mask to queries and keys.

    The limits of a band are inclusive: with a window of W, a token sees W - 1 tokens before itself.
    """
    window = metadata.sliding_window
    if window is not None:
        return {"sparse_mode": BAND_MODE, "pre_tokens": window - 1, "next_tokens": 0}
    return {"sparse_mode": NO_MASK_MODE if metadata.attn_mask is None else CAUSAL_MODE}


def _is_fresh(own: KeyValue | None, metadata: AscendMetadata) -> bool:
    """Return whether a step reads its own K and V instead of the cache."""
    return own is not None and metadata.attn_state == AttentionState.PrefillNoCache


def _encode(
    query: torch.Tensor,
    own: KeyValue,
    metadata: AscendMetadata,
    layer: LayerShape,
    output: torch.Tensor,
) -> None:
    """Attend both ways over the step's own K and V, for encoders, which are never captured."""
    key, value = own
    if metadata.kernel_plan is None:
        metadata.kernel_plan = split(metadata, MAX_ENCODED)
    band: dict[str, Any] = {}
    if metadata.sliding_window is not None:
        assert metadata.attn_mask is not None
        reach = metadata.sliding_window - 1
        mask = metadata.attn_mask.view(torch.bool)  # of int8, which this operator doesn't take
        band = {"atten_mask": mask, "pre_tockens": reach, "next_tockens": reach}
        band["sparse_mode"] = BAND_MODE
    for part in plan_of(metadata):
        tokens = slice(None) if part.tokens is None else part.tokens
        attended = torch_npu.npu_fusion_attention(
            query[tokens],
            key[tokens],
            value[tokens],
            layer.num_heads,
            "TND",
            scale=layer.scale,
            actual_seq_qlen=part.query_ends,
            actual_seq_kvlen=part.query_ends,
            **band,
        )
        output[tokens].copy_(attended[0])


def plan_of(metadata: AscendMetadata) -> list[Part]:
    """Return the parts of a step, made once for all its layers; one part unless it was split."""
    if metadata.kernel_plan is None:
        metadata.kernel_plan = [_whole(metadata)]
    return metadata.kernel_plan


def _whole(metadata: AscendMetadata) -> Part:
    return Part(metadata.query_start_loc_np[1:].tolist(), metadata.seq_lens_np.tolist())


def split(
    metadata: AscendMetadata,
    most_requests: int,  # the most requests of a call
    # The most blocks of a call, where shared blocks are counted for each request
    most_blocks: int = 1 << 62,
    block_size: int = 1,  # the block size of the cache, in tokens
) -> list[Part]:
    """Cut a step into runs of requests that each keep the limits of one call.

    Returns
    -------
    list of Part
        One part if one call serves the step.
    """
    blocks = (-(-metadata.seq_lens_np // block_size)).tolist()
    if len(blocks) <= most_requests and sum(blocks) <= most_blocks:
        return [_whole(metadata)]
    starts, seq_lens = metadata.query_start_loc_np.tolist(), metadata.seq_lens_np.tolist()

    def parts() -> Iterator[Part]:
        first = taken = 0
        for request, count in enumerate([*blocks, most_blocks]):
            is_last = request == len(blocks)
            if is_last or request - first == most_requests or taken + count > most_blocks:
                if request > first:
                    start = starts[first]
                    ends = [end - start for end in starts[first + 1 : request + 1]]
                    requests = slice(first, request)
                    tokens = slice(start, starts[request])
                    yield Part(ends, seq_lens[requests], requests, tokens)
                first, taken = request, 0
            taken += count

    return list(parts())
