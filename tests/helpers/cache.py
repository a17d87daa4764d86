"""Watching the KV cache: which slots a forward pass writes."""

from typing import Any

import torch

from tests.helpers.watch import around_forward


class CacheWatch:
    """Checks after every forward pass that no slots but the step's own were written (one group)."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.padding_seen: set[int] = set()
        around_forward(runner, self._planes, self._compare)

    def _planes(self) -> list[torch.Tensor]:
        """Slots of every plane on the host, ``[num_blocks * block_size, -1]``."""
        return [plane.cpu().flatten(0, 1).flatten(1) for plane in self.runner.kv_caches]

    def _compare(self, before: list[torch.Tensor]) -> None:
        after = self._planes()
        step = self.runner.in_flight.step
        own = set(step.slot_mapping[0].tolist())
        for plane, (old, new) in enumerate(zip(before, after)):
            written = set((old != new).any(1).nonzero().flatten().tolist())
            assert written <= own, (
                f"plane {plane}: slots {sorted(written - own)} were written, the step owns "
                f"{sorted(own)} (padding {step.padding})"
            )
        if step.padding.mode == "FULL":
            self.padding_seen.add(step.num_input_tokens - step.total_num_scheduled_tokens)


class FreeBlocksPoison:
    """Fills blocks that nobody holds with NaN in front of every forward pass: who reads one, shows.

    For engines without a prefix cache, whose free blocks are read again.
    """

    def __init__(self, llm: Any) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self.pool = core.scheduler.kv_cache_manager.block_pool
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.poisoned = 0
        around_forward(self.runner, self._poison, lambda _: None)

    def _poison(self) -> None:
        free = [block.block_id for block in self.pool.blocks if block.ref_cnt == 0]
        planes = self.runner.kv_caches
        self.poisoned += int(planes[0][free].flatten(1).nan_to_num(0).any(1).sum())
        for plane in planes:
            plane[free] = float("nan")
