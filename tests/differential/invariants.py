"""What must hold of a step by the scheduler's own books, which a runner doesn't see.

All else is the full check's (`vllm_npu_prep.observe.full_check`), under which episodes are played.
"""

from typing import Any

import numpy as np
import torch

from tests.differential.pair import GREATEST_DIFFERENCE
from vllm_npu_prep.observe.check_level import make_check

CACHES_EVERY = 25
"""Steps between two comparisons of the whole KV caches."""


class BrokenInvariantError(AssertionError):
    """A prepared step that no device may see."""


def hold(condition: Any, what: str, *values: Any) -> None:
    if not condition:
        raise BrokenInvariantError(f"{what}: {', '.join(map(repr, values))}")


class Invariants:
    """Checks our runner's last step against the scheduler's books."""

    def __init__(self, pair: Any, scheduler: Any) -> None:
        self.pair, self.runner, self.scheduler = pair, pair.ours, scheduler
        self.full_check = make_check("full", pair.ours)

    def check(self, output: Any) -> None:
        """Everything about the step that has just run.

        Raises
        ------
        BrokenInvariantError
            Names what is broken and the values that break it.
        """
        step = self.pair.watched[self.runner].step
        self._check_slots(step, output)
        self.check_layers(step)
        if self.pair.steps % CACHES_EVERY == 0:
            self.caches_agree()

    def _check_slots(self, step: Any, output: Any) -> None:
        """Slots are distinct, in blocks of their request, and what others have read stays."""
        total, writers = step.total_num_scheduled_tokens, {}  # request by block
        req_ids, manager = self.runner.input_batch.req_ids, self.scheduler.kv_cache_manager
        for group in range(self.runner.preparer.tables.shape.num_groups):
            slots, padding = step.slot_mapping[group], step.arrays.slot_mapping[group]
            hold((padding[total:] == -1).all(), "slots of padding", padding[total:])
            hold(len(np.unique(slots)) == total, "slots are distinct", slots)
            block_size = int(step.batch.tables.block_sizes[group])
            hold((slots >= block_size).all(), "no slot of the null block", slots)
            for row, req_id in enumerate(req_ids):
                written = set((slots[step.req_indices == row] // block_size).tolist())
                owned = set(manager.get_block_ids(req_id)[group])
                hold(written <= owned, "slots in blocks of their request", req_id, written, owned)
                twice = written & writers.keys()
                hold(not twice, "a block has one writer in one group", req_id, twice)
                writers |= dict.fromkeys(written, req_id)
        self.check_owners(output, writers)

    def check_owners(self, output: Any, writers: dict[int, str]) -> None:
        """A block of two running requests is a cached one, which nobody writes.

        The scheduler calls a block cached once its tokens are scheduled: what a request writes,
        those may share that begin in this very step.
        """
        manager = self.scheduler.kv_cache_manager
        begin = {new.req_id for new in output.scheduled_new_reqs}
        begin |= output.scheduled_cached_reqs.resumed_req_ids
        owners: dict[int, list[str]] = {}
        for request in self.scheduler.running:
            for block_ids in manager.get_block_ids(request.request_id):
                for block in filter(None, block_ids):  # 0 is the null block
                    owners.setdefault(block, []).append(request.request_id)
        for block, req_ids in owners.items():
            if len(req_ids) > 1:
                hold(len(set(req_ids)) == len(req_ids), "blocks stand once", block, req_ids)
                cached = manager.block_pool.blocks[block].block_hash is not None
                hold(cached, "shared blocks are cached", block, req_ids)
                if block in writers:
                    others = set(req_ids) - begin - {writers[block]}
                    hold(not others, "shared blocks are not written", block, writers[block], others)

    def check_layers(self, step: Any) -> None:
        """The same of what layers were given in the forward pass as of what was prepared."""
        seen = self.pair.watched[self.runner].attn_metadata
        seen = {name: getattr(each, "step", each) for name, each in seen.items()}  # MLA's wraps it
        self.full_check.check_layers(self.runner, step, seen)

    def caches_agree(self) -> None:
        """Both runners' caches hold the same: nothing was written but by a step's own tokens."""
        ours, theirs = (self.pair.caches[each] for each in (self.runner, self.pair.upstream))
        atol = GREATEST_DIFFERENCE[self.runner.dtype]
        for name, cache in ours.items():
            if name in self.pair.own_layers:
                continue
            hold(torch.allclose(cache, theirs[name], atol=atol), "KV caches agree", name)
