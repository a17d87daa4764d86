"""Latent attention of the reference family: plain torch, for the CPU.

As in `reference`, only the mask of the metadata decides which token sees which, and sums are
computed in float32. Decodes use its tiles; prefills are computed one request after the other.
"""

from collections.abc import Callable, Sequence

import torch

from vllm_npu_prep.attention.context_parallel import merge_partials
from vllm_npu_prep.attention.families import REFERENCE
from vllm_npu_prep.attention.kernels import Attended
from vllm_npu_prep.attention.kernels.latent import (
    LatentCall,
    LatentShape,
    Planes,
    Projected,
)
from vllm_npu_prep.attention.kernels.reference import (
    TILE_PAIRS,
    TilePlan,
    attend_tile,
    masked_pairs,
    plan_tiles,
    tile_bytes,
)
from vllm_npu_prep.attention.latent import ContextChunk, Prefills
from vllm_npu_prep.attention.metadata import AscendMetadata


class LatentReferenceKernels:
    """`vllm_npu_prep.attention.kernels.latent.LatentKernels` in plain torch."""

    family = REFERENCE
    workspace_serves_all_lengths = True

    def decode_heads(self, num_heads: int) -> int:
        return num_heads

    def write(
        self,
        latent: torch.Tensor,
        rope: torch.Tensor,
        planes: Planes,
        slot_mapping: torch.Tensor,
    ) -> None:
        check_latent_rows(latent, rope, planes, slot_mapping)
        slots = slot_mapping.long()
        is_real = slots >= 0
        for plane, rows in zip(planes, (latent, rope)):
            plane.view(-1, *plane.shape[2:]).index_copy_(0, slots[is_real], rows[is_real])

    def attend_latent(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        planes: Planes,
        metadata: AscendMetadata,
        shape: LatentShape,
        output: torch.Tensor,
        workspace: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend over latent rows: a head's key is a latent row with its rotated key."""
        del workspace
        if metadata.kernel_plan is None:
            metadata.kernel_plan = plan_tiles(metadata, len(query))
        plan: TilePlan = metadata.kernel_plan
        rows = [plane.view(-1, *plane.shape[2:]) for plane in planes]
        heads = torch.cat((query, query_rope), -1)
        for tile in plan.each(metadata, planes.latent.shape[1]):
            latent, rope = (plane.index_select(0, tile.kv_indices) for plane in rows)
            keys = torch.cat((latent, rope), -1)
            attend_tile(tile, heads, keys, latent, shape.scale, output, lse=lse)
        output[metadata.num_actual_tokens :].zero_()  # padding attends to nothing

    def attend_prompts(
        self,
        given: Projected,
        prefills: Prefills,
        metadata: AscendMetadata,
        shape: LatentShape,
        output: torch.Tensor,
        wants_lse: bool,
    ) -> Attended:
        """Attend over the step's own K and V, with the prefills' part of the step's mask."""
        del wants_lse  # it costs nothing here

        def visible(request: int, first: int, last: int) -> torch.Tensor:
            start = [0, *prefills.query_ends][request]
            positions = prefills.computed[request] + torch.arange(
                prefills.query_ends[request] - start
            )
            tokens = torch.arange(prefills.first_token + first, prefills.first_token + last)
            own = positions[first - start : last - start]
            masked = masked_pairs(metadata, tokens[None], own[None], positions[None], False)
            assert masked is not None, "prompts of several tokens have a mask"
            return ~masked[0]

        attended = _attend(given, prefills.query_ends, prefills.query_ends, shape, visible)
        output.copy_(attended.output)
        return Attended(output, attended.lse)

    def attend_context(self, given: Projected, chunk: ContextChunk, shape: LatentShape) -> Attended:
        return _attend(given, chunk.query_ends, chunk.kv_ends, shape)

    def gather(self, planes: Planes, chunk: ContextChunk) -> tuple[torch.Tensor, torch.Tensor]:
        block_size = planes.latent.shape[1]
        slots = []
        for row, start, length in zip(chunk.block_tables, chunk.starts, chunk.lens):
            positions = torch.arange(int(start), int(start) + int(length))
            slots.append(row.long()[positions // block_size] * block_size + positions % block_size)
        indices = torch.cat(slots)
        latent, rope = (plane.view(-1, *plane.shape[2:])[indices] for plane in planes)
        return latent, rope

    def merge(self, first: Attended, second: Attended) -> Attended:
        return merge_partials([first, second])

    def workspace(
        self, call: LatentCall, metadata: object
    ) -> None: ...  # torch allocates what it needs

    def working_bytes(
        self, shape: LatentShape, itemsize: int, max_seq_len: int, chunk_rows: int
    ) -> int:
        heads, width = shape.num_heads, shape.kv_lora_rank
        decodes = tile_bytes(heads, 1, width + shape.qk_rope_head_dim, width, itemsize, max_seq_len)
        floats = torch.float32.itemsize
        of_row = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
        rows = chunk_rows * heads * of_row * (2 * itemsize + 2 * floats)
        scores = max(TILE_PAIRS, chunk_rows) * (4 * floats * heads + 16)
        return max(decodes, rows + scores)


def check_latent_rows(
    latent: torch.Tensor, rope: torch.Tensor, planes: Planes, slot_mapping: torch.Tensor
) -> None:
    """Assert what the Ascend kernels demand of rows that are written to a cache."""
    assert slot_mapping.dtype == torch.int32, f"slots are int32, not {slot_mapping.dtype}"
    assert len(latent) == len(rope) == len(slot_mapping), "one slot for each token"
    for plane, rows in zip(planes, (latent, rope)):
        assert plane.is_contiguous() and plane.dtype == rows.dtype
        assert rows.shape[1:] == plane.shape[2:], f"{rows.shape} into {plane.shape}"


def _attend(
    given: Projected,
    query_ends: Sequence[int],
    kv_ends: Sequence[int],
    shape: LatentShape,
    visible: Callable[[int, int, int], torch.Tensor] | None = None,
) -> Attended:
    """Attend with each request's queries over its own rows, in float32, a few queries at a time.

    ``visible(request, first, last)`` returns the mask of some queries, True where a row is seen.
    """
    num_tokens, num_heads, _ = given.query.shape
    queries = torch.cat((given.query, given.query_rope), -1)
    output = given.query.new_zeros(num_tokens, num_heads, shape.v_head_dim)
    lse = torch.full((num_tokens, num_heads), float("-inf"))
    begin = kv_begin = 0
    for request, (end, kv_end) in enumerate(zip(query_ends, kv_ends)):
        rows = slice(kv_begin, kv_end)
        rope = given.key_rope[rows].expand(-1, num_heads, -1)
        key = torch.cat((given.key[rows], rope), -1).float().permute(1, 2, 0)  # [N, D, S]
        value = given.value[rows].float().transpose(0, 1)  # [N, S, D]
        step = max(1, TILE_PAIRS // max(kv_end - kv_begin, 1))
        for first in range(begin, end, step):
            last = min(first + step, end)
            scores = queries[first:last].float().transpose(0, 1) @ key * shape.scale
            if visible is not None:
                seen = visible(request, first, last)
                scores.masked_fill_(~seen, float("-inf"))
            sums = scores.logsumexp(-1)  # [N, T]
            result = (scores - sums.unsqueeze(-1)).exp() @ value
            output[first:last] = result.transpose(0, 1).to(output.dtype)
            lse[first:last] = sums.transpose(0, 1)
        begin, kv_begin = end, kv_end
    return Attended(output, lse)
