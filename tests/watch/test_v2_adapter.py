"""What the watch reads of a runner like vLLM's V2, whose kernels need Triton: of a stand-in."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.watch.adapter import Wraps
from vllm_npu_prep.watch.runner_step import RunnerStep, check_lists
from vllm_npu_prep.watch.v2 import AscendV2Adapter, V2Adapter

BATCH = SimpleNamespace(
    req_ids=["late", "early"],
    num_reqs=2,
    num_tokens=3,
    num_tokens_after_padding=4,
    idx_mapping=torch.tensor([2, 0]),
    idx_mapping_np=np.array([2, 0]),
    input_ids=torch.tensor([70, 71, 72, 99]),
    positions=torch.tensor([5, 6, 2, 99]),
    query_start_loc=torch.tensor([0, 2, 3, 4]),
    seq_lens=torch.tensor([7, 3, 0]),
    logits_indices=torch.tensor([1, 2]),
)
TABLE, SLOTS = torch.tensor([[8, 9, 0], [4, 0, 0], [0, 0, 0]]), torch.tensor([[37, 38, 18, -1]])
FULL = SimpleNamespace(cg_mode=SimpleNamespace(name="FULL"))


def stand_in() -> Any:
    """A runner that prepares one step again and again; requests have rows 2 and 0 of three."""
    tokens = SimpleNamespace(sampled_token_ids=torch.tensor([[5, 6], [7, 1]]))
    attention = SimpleNamespace(seq_lens_list=[7, 2, 0], actual_seq_lengths_q=[2, 3, 4])
    return SimpleNamespace(
        block_tables=SimpleNamespace(
            block_sizes=[4],
            input_block_tables=[TABLE],
            num_blocks=SimpleNamespace(np=np.array([[1, 3, 2]])),
        ),
        req_states=SimpleNamespace(
            num_computed_tokens=SimpleNamespace(gpu=torch.tensor([2, 30, 5]))
        ),
        prepare_inputs=lambda output, descriptor: BATCH,
        prepare_attn=lambda batch: ([TABLE], SLOTS),
        model_state=SimpleNamespace(
            prepare_inputs=lambda *args: {}, attn_metadata={"layer": attention}
        ),
        sample=lambda hidden, batch: (tokens, torch.tensor([2, 1]), None),
    )


def run_step(runner: Any) -> None:
    runner.prepare_inputs("output", FULL)
    runner.prepare_attn(BATCH)
    runner.model_state.prepare_inputs(BATCH, runner.req_states)
    runner.sample("hidden", BATCH)


def call(do: Any, *args: Any) -> None:
    do(*args)


def steps_of(kind: type[V2Adapter], runner: Any, count: int) -> list[RunnerStep]:
    adapter, wraps, seen = kind(runner), Wraps(call), []
    adapter.before_forward(wraps, lambda: seen.append(adapter.read(None)))
    for _ in range(count):
        run_step(runner)
    wraps.undo()
    return seen


def test_arrays_are_read_in_the_order_of_the_batch():
    assert V2Adapter(stand_in()).tables() == ([4], [3])
    [step] = steps_of(V2Adapter, stand_in(), 1)
    assert (step.req_ids, step.num_input_tokens, step.kind) == (BATCH.req_ids, 4, "full graph")
    assert step.input_ids.tolist() == [70, 71, 72]
    assert step.positions.tolist() == [5, 6, 2]
    assert step.query_start_loc.tolist() == [0, 2, 3]
    assert step.seq_lens.tolist() == [7, 3] and step.num_computed_tokens.tolist() == [5, 2]
    assert step.slot_mapping.tolist() == [[37, 38, 18, -1]]
    assert step.num_blocks.tolist() == [[2, 1]]
    assert step.block_tables[0].tolist() == [[8, 9], [4, 0]]
    assert step.sampled == {} and step.of_layers == {}


def test_samples_of_the_last_step_are_known_by_request():
    _, second = steps_of(V2Adapter, stand_in(), 2)
    assert second.sampled == {"late": [5, 6], "early": [7]}


def test_lists_that_attention_gets_from_the_host_are_read():
    [step] = steps_of(AscendV2Adapter, stand_in(), 1)
    assert {name: told.tolist() for name, told in step.of_layers.items()} == {
        "query_start_loc": [0, 2, 3],
        "seq_lens": [7, 2],
    }


def test_a_list_that_differs_from_the_device_is_named():
    [step] = steps_of(AscendV2Adapter, stand_in(), 1)
    with pytest.raises(StepCheckError, match="request early: given 2, allowed 3"):
        check_lists(step, step)  # of both, only these arrays are read


def test_a_dummy_run_is_not_read_and_all_is_undone():
    runner = stand_in()
    before, seen, wraps = dict(vars(runner)), [], Wraps(call)
    V2Adapter(runner).before_forward(wraps, lambda: seen.append(1))
    runner.model_state.prepare_inputs(BATCH, runner.req_states)
    assert seen == [] and vars(runner) != before
    wraps.undo()
    assert vars(runner) == before
