"""With the prefix cache, where states are read and written: here, and by vLLM's `preprocess_mamba`.

vLLM's runner copies a request's state to the block of its last token before a step, and layers read
and write it there. Here nothing is copied: layers read one block and write another. Over requests
that are served step by step, in chunks, preempted and resumed, both take the same states.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm.v1.worker import mamba_utils

from tests.helpers.batches import STATE_GROUPS, drafts_step
from vllm_npu_prep.prep.oracle import OracleRequest

MAX_MODEL_LEN, NUM_REQS, NUM_STEPS = 60, 3, 16
NUM_BLOCKS = 2200  # ids of the second group are the first's plus 1000


preprocess_mamba = mamba_utils.preprocess_mamba
"""vLLM's: an engine with states that starts later in this process replaces it there."""


class Upstream:
    """`preprocess_mamba` over the requests of a batch, whose copies of states are noted."""

    def __init__(self, size: int, num_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = MambaSpec(  # type: ignore[misc]
            size,
            ((1,),),
            (torch.float32,),
            mamba_cache_mode="align",
            num_speculative_blocks=num_drafts,
        )
        # Of each group, an element for each block: addresses of copies tell which these are
        self.states = [torch.zeros(NUM_BLOCKS, 1) for _ in STATE_GROUPS]
        names = [f"layer of group {group}" for group in STATE_GROUPS]
        attention = KVCacheGroupSpec([], spec)  # its group is not looked at
        groups = [attention] * (max(STATE_GROUPS) + 1)
        for group, name in zip(STATE_GROUPS, names):
            groups[group] = KVCacheGroupSpec([name], spec)
        self.config = SimpleNamespace(kv_cache_groups=groups)
        self.layers = {n: SimpleNamespace(kv_cache=[s]) for n, s in zip(names, self.states)}
        buffers = [SimpleNamespace(np=np.zeros(8 * NUM_REQS, np.uint64)) for _ in range(3)]
        self.copies = mamba_utils.MambaCopyBuffers(*buffers, [*STATE_GROUPS], spec)  # type: ignore[arg-type]
        self.copy_funcs: Any = {spec.mamba_type: (get_temporal_copy_spec,)}
        self.columns: dict[str, int] = {}  # of each request's state, among its blocks
        monkeypatch.setattr(mamba_utils, "do_mamba_copy_block", lambda copies: None)

    def prepare(
        self, batch: dict[str, OracleRequest], accepted: list[int], ended: set[str]
    ) -> list[dict[int, int]]:
        """Blocks that are copied before a step, by the block that they are copied to, by group."""
        blocks = {req_id: _by_group(request) for req_id, request in batch.items()}
        preprocess_mamba(
            SimpleNamespace(  # type: ignore[arg-type]
                finished_req_ids=set(),
                preempted_req_ids=ended,
                scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
                num_scheduled_tokens={r: each.num_scheduled_tokens for r, each in batch.items()},
            ),
            self.config,  # type: ignore[arg-type]
            SimpleNamespace(enable_prefix_caching=True),  # type: ignore[arg-type]
            self.columns,
            SimpleNamespace(  # type: ignore[arg-type]
                req_ids=[*batch], num_accepted_tokens_cpu=np.array(accepted)
            ),
            {
                req_id: SimpleNamespace(  # type: ignore[misc]
                    num_computed_tokens=each.num_computed_tokens, block_ids=blocks[req_id]
                )
                for req_id, each in batch.items()
            },
            self.layers,
            self.copy_funcs,
            self.copies,
        )
        copied: list[dict[int, int]] = [{} for _ in STATE_GROUPS]
        for source, target in zip(self.copies.src_ptrs.np, self.copies.dst_ptrs.np):
            if self.copies.offset == sum(map(len, copied)):
                break
            (group, first), *_ = [
                (index, int(target) - state.data_ptr())
                for index, state in enumerate(self.states)
                if 0 <= int(target) - state.data_ptr() < state.nbytes
            ]
            copied[group][first // 4] = (int(source) - self.states[group].data_ptr()) // 4
        return copied


def _by_group(request: OracleRequest) -> list[list[int]]:
    groups: list[list[int]] = [[] for _ in range(max(STATE_GROUPS) + 1)]
    groups[STATE_GROUPS[0]] = list(request.block_ids)
    groups[STATE_GROUPS[1]] = [1000 + block for block in request.block_ids]
    return groups


class Served:
    """A request that is served in random steps, and is preempted now and then."""

    def __init__(self, row: int, size: int, num_drafts: int, rng: np.random.Generator) -> None:
        self.row, self.size, self.num_drafts, self.rng = row, size, num_drafts, rng
        self.prompt = int(rng.integers(1, 30))
        self.computed = self.drafts = self.scheduled = 0
        self.kept, self.accepted = 1, 1  # tokens of the last step that count: here, and upstream
        self.lives = 0
        self._take_blocks()

    def _take_blocks(self) -> None:
        first = 1 + 330 * self.row + 30 * (self.lives % 11)
        self.blocks = (first + self.rng.permutation(30)).tolist()[: 60 // self.size + 8]

    def preempt(self, *held: dict[int, int]) -> bool:
        """Lose all blocks now and then, and find a state again in the prefix cache, if there is."""
        if not self.computed or self.rng.random() > 0.1:
            return False
        former = self.blocks
        ends = range(1, self.computed // self.size + 1)
        kept = [n for n in ends if all(h.get(former[n - 1]) == n * self.size for h in held)]
        found = int(self.rng.choice([0, *kept]))
        self.lives += 1
        self._take_blocks()
        self.blocks[:found] = former[:found]
        self.prompt = max(self.prompt, self.computed)  # what was generated is computed again
        self.computed, self.kept, self.accepted = found * self.size, 1, 1
        return True

    def schedule(self) -> OracleRequest | None:
        """The next chunk, which ends at a block or with the prompt, or the next decode."""
        left, self.drafts = self.prompt - self.computed, 0
        if left > 0:
            self.scheduled = left
            ends = (self.computed + left) // self.size * self.size - self.computed
            if ends > 0 and self.rng.random() < 0.7:
                self.scheduled = min(left, self.size * int(self.rng.integers(1, 4)))
        else:
            self.drafts = int(self.rng.integers(0, self.num_drafts + 1))
            self.scheduled = 1 + self.drafts
        if self.computed + self.scheduled > MAX_MODEL_LEN - self.num_drafts:
            return None
        known = self.computed + self.scheduled - self.drafts
        return OracleRequest(
            num_computed_tokens=self.computed,
            num_scheduled_tokens=self.scheduled,
            num_prompt_tokens=self.prompt,
            token_ids=list(range(max(known, self.prompt))),
            block_ids=self.blocks,
            num_draft_tokens=self.drafts,
            draft_token_ids=[9] * self.drafts,
            num_accepted_tokens=self.kept,
        )

    def advance(self) -> None:
        """Verify drafts, some of which count."""
        verifies = self.computed >= self.prompt
        self.accepted = 1 + (int(self.rng.integers(0, self.drafts + 1)) if verifies else 0)
        counted = self.accepted if verifies else self.scheduled
        self.kept = counted if self.scheduled <= 1 + self.num_drafts else 1
        self.computed += counted


@settings(max_examples=settings.default.max_examples // 5)  # an example is a run of 16 steps
@given(st.sampled_from([4, 5, 8]), st.integers(0, 3), st.integers(0, 2**31 - 1))
def test_states_are_taken_from_where_upstream_copies_them(size, num_drafts, seed):
    """Without drafts, block for block; with drafts, the states after the same tokens.

    There a decode's states begin in the block of its last token here, in that of its first.
    """
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        upstream = Upstream(size, num_drafts, monkeypatch)
        served = {str(row): Served(row, size, num_drafts, rng) for row in range(NUM_REQS)}
        # Tokens after which each block holds the state, by group
        ours: list[dict[int, int]] = [{} for _ in STATE_GROUPS]
        theirs: list[dict[int, int]] = [{} for _ in STATE_GROUPS]
        for _ in range(NUM_STEPS):
            ended = {req_id for req_id, each in served.items() if each.preempt(ours[0], theirs[0])}
            batch = {req_id: each.schedule() for req_id, each in served.items()}
            batch = {req_id: each for req_id, each in batch.items() if each is not None}
            if not batch:
                break
            batch = dict(
                sorted(
                    batch.items(), key=lambda item: item[1].num_scheduled_tokens > num_drafts + 1
                )
            )
            check_step(batch, served, upstream, ended, ours, theirs)
            for req_id in batch:
                served[req_id].advance()


def check_step(
    batch: dict[str, OracleRequest],
    served: dict[str, Served],
    upstream: Upstream,
    ended: set[str],
    ours: list[dict[int, int]],
    theirs: list[dict[int, int]],
) -> None:
    size, num_drafts = served["0"].size, served["0"].num_drafts
    step = drafts_step([*batch.values()], MAX_MODEL_LEN, num_drafts, size)
    copied = upstream.prepare(batch, [served[req_id].accepted for req_id in batch], ended)
    assert step.states is not None
    for index, group in enumerate(STATE_GROUPS):
        for target, source in copied[index].items():
            theirs[index][target] = theirs[index][source]
        for row, (req_id, request) in enumerate(batch.items()):
            blocks, computed = _by_group(request)[group], request.num_computed_tokens
            end, column = computed + request.num_scheduled_tokens, upstream.columns[req_id]
            reads = int(step.initial_state_indices[index, row])
            writes = int(step.state_indices[index, row])
            if not num_drafts:
                assert writes == blocks[column]
                assert reads == (copied[index].get(writes, writes) if computed else 0)
            if computed:
                bias = 0 if blocks[column] in copied[index] else served[req_id].accepted - 1
                assert ours[index][reads] == theirs[index][blocks[column + bias]] == computed
            start, stop = step.query_start_loc[row : row + 2].tolist()
            after = {writes: end}
            if num_drafts and row < step.states.num_decodes:
                of_tokens = step.token_state_indices[index, start:stop].tolist()
                after = dict(zip(of_tokens, range(computed + 1, end + 1)))
            ours[index] |= after
            verifies = computed >= request.num_prompt_tokens
            counts = range(computed + 1, end + 1) if verifies else [end]
            theirs[index] |= {blocks[column + i]: count for i, count in enumerate(counts)}
        for request in batch.values():  # what the prefix cache may hand to others
            blocks = _by_group(request)[group]
            ends = {
                n: blocks[n // size - 1] for n in range(size, request.num_computed_tokens, size)
            }
            found = [n for n, block in ends.items() if theirs[index].get(block) == n]
            assert all(ours[index].get(ends[n]) == n for n in found)
