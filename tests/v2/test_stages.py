"""Samples that pipeline stages send each other: every stage finds the last one of each request."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.traffic import Traffic
from vllm_npu_prep.runner.v2 import stages
from vllm_npu_prep.runner.v2.request_states import Samples

NUM_ROWS = 12


class Stage:
    """A stage's end of a broadcast: it has what the last stage sent when it waits for it."""

    def __init__(self, sent: list[torch.Tensor], is_last: bool) -> None:
        self.sent, self.is_last, self.number = sent, is_last, -1
        self.handler = stages.BroadcastPPHandler(NUM_ROWS, torch.device("cpu"))
        self.handler._group = self
        self.samples = Samples(NUM_ROWS)

    def begin_step(self) -> None:
        due = self.handler.due()
        if due is not None:
            self.samples.keep(due.token_ids, due.request_rows, due.discard)

    def wait(self, token_ids: torch.Tensor, number: int) -> None:
        if not self.is_last:
            token_ids.copy_(self.sent[number])


def broadcast(
    token_ids: torch.Tensor, last_rank: int, stage: Stage, async_op: bool
) -> SimpleNamespace:
    assert async_op, "a stage goes on"
    stage.number += 1
    if stage.is_last:
        stage.sent.append(token_ids.clone())
    number = stage.number
    return SimpleNamespace(wait=lambda: stage.wait(token_ids, number))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_every_stage_finds_every_sample(monkeypatch, seed, num_stages):
    """Rows are freed and given away while samples are on their way; chunks have none.

    A request never continues from a sample of another one that had its row (GHSA-v97p-wpxp-px84).
    """
    group = SimpleNamespace(
        last_rank=num_stages - 1, world_size=num_stages, make_sibling_device_group=lambda **_: None
    )
    monkeypatch.setattr(stages, "get_pp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    sent: list[torch.Tensor] = []
    ranks = [Stage(sent, stage == num_stages - 1) for stage in range(num_stages)]
    traffic, last, eligible = Traffic(seed), {}, dict.fromkeys(range(NUM_ROWS), 0)
    for step in range(300):
        for each in ranks:
            each.begin_step()
        for row in [row for row in last if traffic.chance(0.05, "freed")]:
            del last[row]
            eligible[row] = step  # another request has it, maybe in this step
            for each in ranks:
                each.samples.forget(row)
                each.handler.on_req_idx_freed(row)
        ready = [row for row in range(NUM_ROWS) if eligible[row] <= step]
        rows = np.array(traffic.shuffled(ready)[: traffic.number(0, 6)], int)
        continues = np.array([row in last for row in rows], bool)
        chunks = np.array([traffic.chance(0.5, "chunk") for _ in rows], bool)
        discard = chunks & ~continues
        tokens = np.arange(100 * step, 100 * step + len(rows))
        for each in ranks:
            assert set(np.flatnonzero(each.samples.rows >= 0)) <= last.keys()
            found = each.samples.find(rows, continues)
            for row, place in zip(rows[continues], found.rows[continues]):
                assert found.token_ids[place] == last[row]
            drawn = torch.tensor(tokens, dtype=torch.int32) if each.is_last else None
            if len(rows):
                each.handler.exchange(drawn, [str(row) for row in rows], rows, discard)
        for row, token in zip(rows[~discard], tokens[~discard]):
            last[row], eligible[row] = token, step + num_stages
    assert min(traffic.count[name] for name in ("freed", "chunk")) > 40
