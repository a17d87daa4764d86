"""What must hold of every step that was prepared, whatever prepared it."""

from typing import Any

import numpy as np
import torch

from vllm_npu_prep.prep.oracle import OracleRequest, oracle_step
from vllm_npu_prep.prep.padding import GraphMode

CACHES_EVERY = 25
"""Steps between two comparisons of the whole KV caches."""


class BrokenInvariantError(AssertionError):
    """A prepared step that no device may see."""


def hold(condition: Any, what: str, *values: Any) -> None:
    if not condition:
        raise BrokenInvariantError(f"{what}: {', '.join(map(repr, values))}")


class Invariants:
    """Checks our runner's last step against the scheduler's books and against the scalar oracle."""

    def __init__(self, pair: Any, scheduler: Any, seed: int) -> None:
        self.pair, self.runner, self.scheduler = pair, pair.ours, scheduler
        self.rng = np.random.default_rng(seed)

    def check(self, output: Any) -> None:
        """Everything about the step that has just run.

        Raises
        ------
        BrokenInvariantError
            Names what is broken and the values that break it.
        """
        step = self.runner.last_step
        arrays, total = step.arrays, step.total_num_scheduled_tokens
        starts = arrays.query_start_loc
        hold(starts[0] == 0 and (np.diff(starts) >= 0).all(), "query_start_loc rises", starts)
        hold(starts[step.num_reqs] == total, "real requests end at the tokens", starts, total)
        if step.padding.mode is GraphMode.FULL:
            hold(starts[-1] == step.num_input_tokens, "a full graph ends at its size", starts)
        hold((step.seq_lens >= step.query_lens).all(), "sequences hold their queries")
        hold((step.positions < self.runner.max_model_len).all(), "positions below max_model_len")
        ids = self.pair.watched[self.runner].seen.get("input_ids")
        if ids is not None:
            vocab = self.runner.model_config.get_vocab_size()
            hold(all(0 <= token < vocab for token in ids), "token ids of the vocabulary", ids)
        for group in range(self.runner._num_groups):
            self._check_slots(step, group, output)
        self._check_oracle(step)
        if self.pair.steps % CACHES_EVERY == 0:
            self.caches_agree()

    def _check_slots(self, step: Any, group: int, output: Any) -> None:
        """Slots are distinct, in blocks of their request, and what others have read stays."""
        slots, padding = step.slot_mapping(group), step.arrays.slot_mapping[group]
        total = step.total_num_scheduled_tokens
        hold((padding[total:] == -1).all(), "slots of padding", padding[total:])
        hold(len(np.unique(slots)) == total, "slots are distinct", slots)
        block_size = int(step.batch.tables.block_sizes[group])
        hold((slots >= block_size).all(), "no slot of the null block", slots)
        req_ids, manager = self.runner.input_batch.req_ids, self.scheduler.kv_cache_manager
        for row, req_id in enumerate(req_ids):
            written = set((slots[step.req_indices == row] // block_size).tolist())
            owned = set(manager.get_block_ids(req_id)[group])
            hold(written <= owned, "slots in blocks of their request", req_id, written, owned)
            shared = {b for b in written if manager.block_pool.blocks[b].ref_cnt > 1}
            if shared:
                self._check_shared(req_id, shared, group, output)

    def _check_shared(self, req_id: str, blocks: set[int], group: int, output: Any) -> None:
        """A block that is written may be shared only by requests that begin in this very step.

        The scheduler calls a block cached once its tokens are scheduled.
        """
        begin = {new.req_id for new in output.scheduled_new_reqs}
        begin |= output.scheduled_cached_reqs.resumed_req_ids
        for request in self.scheduler.running:
            if request.request_id not in begin | {req_id}:
                theirs = set(
                    self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[group]
                )
                hold(not theirs & blocks, "shared blocks are not written", req_id, theirs & blocks)

    def _check_oracle(self, step: Any) -> None:
        """State, sizes and slots once more, token by token."""
        batch, tables = self.runner.input_batch, step.batch.tables
        drafts = step.batch.num_draft_tokens
        seen = self.pair.watched[self.runner].seen
        ids = iter(seen.get("input_ids") or step.input_ids.tolist())
        requests = []
        for row, req_id in enumerate(batch.req_ids):
            computed, scheduled = int(step.num_computed_tokens[row]), int(step.query_lens[row])
            tokens = [0] * computed + [next(ids) for _ in range(scheduled)]
            count = int(drafts[row])
            requests.append(
                OracleRequest(
                    num_computed_tokens=computed,
                    num_scheduled_tokens=scheduled,
                    num_prompt_tokens=self.runner.requests[req_id].num_prompt_tokens,
                    token_ids=tokens[: len(tokens) - count],
                    block_ids=self.runner.requests[req_id].block_ids[0],
                    num_draft_tokens=count,
                    draft_token_ids=tokens[len(tokens) - count :],
                )
            )
        expected = oracle_step(
            requests,
            block_size=int(tables.block_sizes[0]),
            max_model_len=self.runner.max_model_len,
            mask="compressed",
            chunked_prefill=tables.chunked_prefill,
        )
        for name in ("positions", "query_start_loc", "seq_lens", "logits_indices", "query_lens"):
            hold(getattr(step, name).tolist() == expected[name], f"{name} as the oracle's")
        hold(step.slot_mapping().tolist() == expected["slot_mapping"], "slots as the oracle's")
        hold(step.max_seq_len == expected["max_seq_len"], "max_seq_len", step.max_seq_len)
        if step.padding.mode is not GraphMode.FULL:
            state = step.attn_state.name
            hold(state == expected["attn_state"], "state", state, expected["attn_state"])

    def caches_agree(self) -> None:
        """Both runners' caches hold the same: nothing was written but by a step's own tokens."""
        ours, theirs = (self.pair.caches[each] for each in (self.runner, self.pair.upstream))
        for name, cache in ours.items():
            hold(torch.allclose(cache, theirs[name], atol=1e-4), "KV caches agree", name)
