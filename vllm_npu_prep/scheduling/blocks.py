"""The bounds below which ``allocate_slots`` would change nothing for a decode.

The batched scheduler then doesn't call it.
"""

from typing import TypeGuard

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)

from vllm_npu_prep.scheduling.requests import NEVER, BatchedRequest, note_quiet


class BlockNeeds:
    """Notes the bounds of a request below which it needs no call of ``allocate_slots``.

    Such a call does three things for a running request (``KVCacheManager.allocate_slots``): it
    frees blocks that left a window, gets blocks for new tokens, and enters full blocks into the
    prefix cache. Each has a number of tokens below which it does nothing. The numbers are lower
    bounds: a call too many changes nothing, either. No blocks are needed for tokens past
    ``max_model_len``.

    Attributes
    ----------
    known
        True if all KV-cache groups are of a kind whose bounds are known. If not, nothing is noted,
        and ``allocate_slots`` is called for each request in each step, as upstream does.
    """

    def __init__(self, manager: KVCacheManager, max_model_len: int) -> None:
        self.managers = manager.coordinator.single_type_managers
        self.max_model_len = max_model_len
        hash_block_size = manager.block_pool.hash_block_size
        self.known = bool(self.managers) and all(
            self._is_known(each, hash_block_size) for each in self.managers
        )

    def _is_known(self, manager: SingleTypeKVCacheManager, hash_block_size: int) -> bool:
        kind = type(manager)
        if kind is FullAttentionManager:
            # With another block size, the manager also caches the block in which a prompt ends
            return manager.block_size == hash_block_size or not manager.enable_caching
        if isinstance(manager, MambaManager) and kind is MambaManager:
            if manager.mamba_cache_mode == "align":
                # No states within a block, and none that a prompt's last chunk leaves apart
                sizes_agree = manager.block_size == hash_block_size
                return sizes_agree and not manager.has_prefill_checkpoint_blocks
            # Without the prefix cache, a block of recurrent states lasts for a request's context
            return manager.block_size >= self.max_model_len
        return kind in _NEXT_FREED

    def note(self, request: BatchedRequest) -> None:
        """Note all bounds of a request, right after ``allocate_slots`` was called for it."""
        if not self.known:
            return
        blocks = window = NEVER
        freed_up_to = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        for manager in self.managers:
            there = len(manager.req_to_blocks.get(request.request_id, ()))
            if _keeps_ends(manager):
                there -= manager.num_speculative_blocks  # MambaManager.allocate_new_blocks
            blocks = min(blocks, there * manager.block_size)
            window = min(window, _NEXT_FREED[type(manager)](manager, freed_up_to))
        request.blocks_until = blocks if blocks < self.max_model_len else NEVER
        request.window_until = window
        self.note_cached(request)

    def note_cached(self, request: BatchedRequest) -> None:
        """Note when the next block can be cached, after ``cache_blocks`` was called."""
        if not self.known:
            return
        cached = NEVER
        for manager in self.managers:
            if manager.enable_caching and manager.kv_cache_spec.prefix_cacheable:
                blocks = manager.num_cached_block.get(request.request_id, 0)
                cached = min(cached, (blocks + 1) * manager.block_size)
                if _keeps_ends(manager) and _keeps_end_of_prompt(manager, request):
                    cached = 0
        request.cached_until = cached
        note_quiet(request)


def _keeps_ends(manager: SingleTypeKVCacheManager) -> TypeGuard[MambaManager]:
    """Return whether a group keeps recurrent states at the ends of blocks for the prefix cache."""
    return isinstance(manager, MambaManager) and manager.mamba_cache_mode == "align"


def _keeps_end_of_prompt(manager: MambaManager, request: BatchedRequest) -> bool:
    """Return whether a request still has the state at the last end of a block in its prompt.

    As long as it has, upstream enters this state into the prefix cache anew in each step, and
    requests that find it wait for the next one (``MambaManager._cache_partial_tail_block``). With
    EAGLE it is the state one block before.
    """
    end = (request.num_prompt_tokens - 1) // manager.block_size
    blocks = manager.req_to_blocks.get(request.request_id, [])
    return not all(block.is_null for block in blocks[max(0, end - 2) : end])


def _never(manager: SingleTypeKVCacheManager, num_tokens: int) -> int:
    return NEVER


def _next_of_window(manager: SingleTypeKVCacheManager, num_tokens: int) -> int:
    """Return the tokens from which on a sliding window leaves another block.

    The window moves by one token with each token.
    """
    skipped = manager.get_num_skipped_tokens(num_tokens)
    return num_tokens + manager.block_size - skipped % manager.block_size


def _next_of_chunk(manager: SingleTypeKVCacheManager, num_tokens: int) -> int:
    """Return the tokens from which on the next chunk has begun: it leaves all blocks before it."""
    assert isinstance(manager, ChunkedLocalAttentionManager)
    size = manager.attention_chunk_size
    return (num_tokens // size + 1) * size


def _next_of_state(manager: SingleTypeKVCacheManager, num_tokens: int) -> int:
    """Return the tokens from which on the state before the last end of a block is left.

    Without the prefix cache, a request has one state, and never leaves it.
    """
    if not _keeps_ends(manager):
        return NEVER
    return ((num_tokens - 1) // manager.block_size + 1) * manager.block_size + 1


_NEXT_FREED = {
    FullAttentionManager: _never,
    SlidingWindowManager: _next_of_window,
    ChunkedLocalAttentionManager: _next_of_chunk,
    MambaManager: _next_of_state,
}
"""For each kind of KV-cache group, the number of tokens from which on it may free another block."""
