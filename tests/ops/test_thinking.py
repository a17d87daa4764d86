"""Budgets of thinking tokens: against the source of upstream's two kernels."""

from collections import Counter

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.sample import thinking_budget

from tests.helpers.triton_source import Source
from vllm_npu_prep.ops.triton.thinking import FORCED, Markers, end_thinking, note_markers

SLOTS, VOCAB, LENGTH = 6, 12, 40
MARKERS = {
    "one token each": Markers([1], [2], [2]),
    "an end of three": Markers([1], [2, 3, 2], [2, 3, 2]),
    "more is forced than ends": Markers([1], [2], [4, 4, 2]),
    "a start of two": Markers([1, 1], [1, 2], [1, 2]),
}


@pytest.mark.parametrize("name", MARKERS)
@pytest.mark.parametrize("most_drafts", [0, 3])
def test_the_end_is_forced_as_by_upstreams_kernels(seed, name, most_drafts):
    """Requests that arrive with some tokens, get more, sit steps out, and verify drafts."""
    markers, rng = MARKERS[name], np.random.default_rng(seed)
    find = Source(thinking_budget, "_update_committed_marker_cache_kernel")
    force = Source(thinking_budget, "_thinking_budget_kernel")
    start, end, forced_end = (
        torch.tensor(each, dtype=torch.int32)
        for each in (markers.start, markers.natural_end, markers.forced_end)
    )
    sizes, forced = (len(start), len(end)), Counter()
    for _ in range(15):
        known = [rng.integers(1, 5, rng.integers(1, 12)).tolist() for _ in range(SLOTS)]
        budgets = rng.integers(-1, 6, SLOTS)
        table = torch.full((SLOTS, LENGTH), 1, dtype=torch.int32)  # rubbish past what is known
        last = torch.tensor([markers.last_of(np.array(tokens)) for tokens in known])
        last = last.to(torch.int32)
        theirs = [torch.full((SLOTS,), each, dtype=torch.int32) for each in (-1, -1, 0)]
        for _ in range(6):
            for slot, tokens in enumerate(known):
                table[slot, : len(tokens)] = torch.tensor(tokens)
            total = torch.tensor([len(tokens) for tokens in known], dtype=torch.int32)
            slots = rng.permutation(SLOTS)[:4]
            drafts = [rng.integers(1, 5, rng.integers(0, most_drafts + 1)) for _ in slots]
            rows = [slot for slot, some in zip(slots, drafts) for _ in range(len(some) + 1)]
            places = torch.tensor([i for some in drafts for i in range(len(some) + 1)])
            inputs = [t for slot, some in zip(slots, drafts) for t in (known[slot][-1], *some)]
            local_pos = places.to(torch.int32)
            if not most_drafts:
                local_pos = torch.zeros(1, dtype=torch.int32).expand(len(rows))
            logits = torch.tensor(rng.normal(size=(len(rows), VOCAB)), dtype=torch.float32)
            expected, of_rows, given = (
                logits.clone(),
                torch.tensor(rows),
                torch.tensor(inputs).int(),
            )
            known_of = torch.tensor(budgets).int(), table, LENGTH, total
            find[(4,)](torch.tensor(slots), *known_of, *theirs, start, end, *sizes, max(sizes), 16)
            force[(len(rows),)](
                *(expected, VOCAB, of_rows, *known_of, given, local_pos.contiguous()),
                *(*theirs[:2], start, end, forced_end, *sizes, len(forced_end)),
            )
            forced.update(expected.argmax(1)[expected.amax(1) == FORCED].tolist())
            note_markers(last, torch.tensor(slots), table, total, markers, most_new=1 + most_drafts)
            end_thinking(
                *(logits, of_rows, known_of[0], last, table, total, given, local_pos),
                markers,
                most_drafts,
            )
            assert torch.equal(logits, expected)
            row = 0
            for slot, some in zip(slots.tolist(), drafts):  # some drafts are accepted
                accepted = int(rng.integers(0, len(some) + 1))
                sampled = int(logits[row + accepted].argmax()) % 5
                known[slot] += [*some[:accepted].tolist(), sampled]
                row += len(some) + 1
    assert forced.keys() == set(markers.forced_end) and min(forced.values()) > 5


def test_markers_of_what_a_request_arrives_with():
    markers = Markers([1, 1], [2], [2])
    assert markers.last_of(np.array([], np.int32)) == [-1, -1]
    assert markers.last_of(np.array([1], np.int32)) == [-1, -1]
    assert markers.last_of(np.array([2, 1, 1, 1, 2, 3], np.int32)) == [2, 4]
