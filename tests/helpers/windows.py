"""Watching windowed groups: what they may read, what they left behind, who owns which block."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tests.helpers.engine import runner_of
from tests.helpers.watch import around_forward

WINDOW = 13
THREE_GROUPS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 16,
    "embedding_scale": 0.1,
}
"""Settings of a Gemma 3 whose layers have a KV-cache group each."""

SHARED_LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 512,
    "altup_num_inputs": 2,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.0] * 4,
    "embedding_scale": 0.1,
    "tie_word_embeddings": True,
}
"""Settings of a Gemma 3n whose last two layers read what the two before them have cached."""


class Poison:
    """Spoils, while a forward pass runs, all of the KV cache that no token of its step may see.

    That is more than the null block and the blocks that the scheduler took from windows: every slot
    but those that a request of the step has in its window. What was there comes back afterwards,
    for the prefix cache and for requests that wait. NaN shows whatever is read, masked or not.

    Also checks that nothing is written there.
    """

    def __init__(self, llm: Any, value: float = float("nan")) -> None:
        self.runner = runner_of(llm)
        self.value = value
        self.left_behind = 0  # rows of windowed groups that begin with blocks outside of it
        self.null_blocks = 0  # rows that begin with the null block: a cached prefix
        around_forward(self.runner, self._spoil, self._give_back)

    def _spoil(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Caches, which of their slots are spoiled, and what they were."""
        in_flight = self.runner.in_flight
        if in_flight is None or not in_flight.step.num_reqs:  # a dummy run
            return []
        saved = [(cache, hidden, cache.clone()) for cache, hidden in self._regions()]
        for cache, hidden, _ in saved:
            cache.masked_fill_(hidden, self.value)
        return saved

    def _give_back(self, saved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        for cache, hidden, before in saved:
            kept = cache.isnan() if self.value != self.value else cache == self.value
            assert (kept | ~hidden).all(), "something was written where nothing is to be seen"
            cache.copy_(torch.where(hidden, before, cache))

    def _regions(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Caches that overlay no other, and which of their slots nobody may see."""
        runner = self.runner
        layers = runner.compilation_config.static_forward_context
        visible: dict[int, tuple[torch.Tensor, set[int]]] = {}
        for index, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            slots = self._visible_slots(index, group.kv_cache_spec)
            for name in group.layer_names:
                cache = layers[name].kv_cache
                visible.setdefault(cache.data_ptr(), (cache, set()))[1].update(slots)
        for cache, slots in visible.values():
            hidden = torch.ones(cache.shape[1:3], dtype=torch.bool)
            hidden.view(-1)[list(slots)] = False
            yield cache, hidden[None, :, :, None, None].to(cache.device)

    def _visible_slots(self, group: int, spec: Any) -> list[int]:
        step, size = self.runner.in_flight.step, spec.block_size
        windowed = isinstance(spec, SlidingWindowSpec)
        slots = []
        table = step.batch.tables.block_table(group)[step.request_rows]
        for row, block_ids in enumerate(table.tolist()):
            first_seen = 0
            if windowed:
                first_seen = max(0, int(step.num_computed_tokens[row]) - spec.sliding_window + 1)
                self.left_behind += first_seen >= size
                self.null_blocks += first_seen >= size and block_ids[0] == 0
            for position in range(first_seen, int(step.seq_lens[row])):
                block_id = block_ids[position // size]
                assert block_id != 0, "a token is to see the null block"
                slots.append(block_id * size + position % size)
        return slots
