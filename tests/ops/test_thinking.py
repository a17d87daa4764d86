"""Budgets of thinking tokens: against a scalar reading of upstream's two kernels."""

import numpy as np
import pytest
import torch

from vllm_npu_prep.ops.triton.thinking import FORCED, Markers, end_thinking, note_markers

SLOTS, VOCAB, LENGTH = 6, 12, 40
MARKERS = {
    "one token each": Markers([1], [2], [2]),
    "an end of three": Markers([1], [2, 3, 2], [2, 3, 2]),
    "more is forced than ends": Markers([1], [2], [4, 4, 2]),
    "a start of two": Markers([1, 1], [1, 2], [1, 2]),
}


def kernels(logits, tokens, budget, markers):
    """One row of logits, after `tokens`: both kernels of the source, token by token."""
    last_start = last_end = -1
    for place in range(len(tokens)):
        if tokens[place : place + len(markers.start)] == list(markers.start):
            last_start = place
        if tokens[place : place + len(markers.natural_end)] == list(markers.natural_end):
            last_end = place
    if budget < 0 or last_start < 0 or last_start <= last_end:
        return False
    if len(tokens) - (last_start + len(markers.start)) < budget:
        return False
    forced = list(markers.forced_end)
    begun = 0
    for prefix_len in range(1, len(forced)):
        if prefix_len <= len(tokens) and tokens[-prefix_len:] == forced[:prefix_len]:
            begun = prefix_len
    logits[forced[begun]] = 1.0e9
    return begun + 1


@pytest.mark.parametrize("name", MARKERS)
@pytest.mark.parametrize("most_drafts", [0, 3])
def test_the_end_is_forced_as_by_upstreams_kernels(seed, name, most_drafts):
    """Requests that arrive with some tokens, get more, sit steps out, and verify drafts."""
    markers, rng = MARKERS[name], np.random.default_rng(seed)
    forced = {False: 0} | dict.fromkeys(range(1, 1 + len(markers.forced_end)), 0)
    for _ in range(25):
        known = [rng.integers(1, 5, rng.integers(1, 12)).tolist() for _ in range(SLOTS)]
        budgets = rng.integers(-1, 6, SLOTS)
        table = torch.full((SLOTS, LENGTH), 1, dtype=torch.int32)  # rubbish past what is known
        last = torch.tensor([markers.last_of(np.array(tokens)) for tokens in known])
        last = last.to(torch.int32)
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
            expected = logits.clone()
            row = 0
            for slot, some in zip(slots.tolist(), drafts):
                for count in range(len(some) + 1):
                    tokens = known[slot] + some[:count].tolist()
                    forced[kernels(expected[row], tokens, budgets[slot], markers)] += 1
                    row += 1
            note_markers(last, torch.tensor(slots), table, total, markers, most_new=1 + most_drafts)
            end_thinking(
                *(logits, torch.tensor(rows), torch.tensor(budgets, dtype=torch.int32), last),
                *(table, total, torch.tensor(inputs, dtype=torch.int32), local_pos),
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
    assert min(forced.values()) > 10 and FORCED == 1.0e9


def test_markers_of_what_a_request_arrives_with():
    markers = Markers([1, 1], [2], [2])
    assert markers.last_of(np.array([], np.int32)) == [-1, -1]
    assert markers.last_of(np.array([1], np.int32)) == [-1, -1]
    assert markers.last_of(np.array([2, 1, 1, 1, 2, 3], np.int32)) == [2, 4]
