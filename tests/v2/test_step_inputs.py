"""The inputs of a step in the form that upstream's V2 code reads."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_npu_prep.device.staging import StagedArrays
from vllm_npu_prep.prep.padding import GraphMode, Padding, no_padding
from vllm_npu_prep.prep.pcp import NO_PCP
from vllm_npu_prep.runner.v2.step_inputs import StepInputs

DECODES = SimpleNamespace(
    req_ids=["a", "b"],
    num_scheduled_tokens=np.ones(2, np.int32),
    num_tokens=2,
    idx_mapping_np=np.array([1, 0]),
    prefill_len_np=np.full(2, 3),
    num_computed_prefill_tokens_np=np.full(2, 3),
    is_prefilling_np=np.zeros(2, bool),
    has_prefill=False,
    decode_graph_eligible=True,
)


def step_with(padding: Padding, num_logits: int) -> SimpleNamespace:
    rank_tokens, shape = padding.num_input_tokens, SimpleNamespace(pcp=NO_PCP)
    return SimpleNamespace(
        padding=padding, num_logits=num_logits, num_rank_tokens=rank_tokens, shape=shape
    )


def staged() -> StagedArrays:
    """A buffer with the arrays that are read."""
    names = "idx_mapping", "seq_lens", "query_start_loc", "model_input_ids", "model_positions"
    names = *names, "model_is_padding"
    arrays = SimpleNamespace(**{name: torch.zeros(2, dtype=torch.int32) for name in names})
    on_host = SimpleNamespace(query_start_loc=np.arange(3), num_computed_tokens=np.full(2, 3))
    return StagedArrays(on_host, arrays, arrays)


def test_inputs_are_made_once_for_a_batch_and_a_buffer():
    inputs, buffers = StepInputs(2, torch.device("cpu")), (staged(), staged())
    eager, in_graph = no_padding(2, 2), Padding(2, 2, mode=GraphMode.PIECEWISE)

    def of(now: SimpleNamespace, buffer: StagedArrays, padding: Padding = eager, structured=False):
        step = step_with(padding, 2)
        return inputs.of_step(now, SimpleNamespace(step=step, staged=buffer), structured)

    first, second = (of(DECODES, buffer) for buffer in buffers)
    assert first.seq_lens is buffers[0].device.seq_lens
    assert second.seq_lens is buffers[1].device.seq_lens
    assert of(DECODES, buffers[0]) is first and of(DECODES, buffers[1]) is second
    assert first.is_padding is None and not first.has_structured_output_reqs
    again = of(DECODES, buffers[0], in_graph, structured=True)
    assert (
        again.is_padding is buffers[0].device.model_is_padding and again.has_structured_output_reqs
    )
    again = of(DECODES, buffers[0])
    assert again.is_padding is None, "the same sizes without a graph"
    assert not again.has_structured_output_reqs


def test_a_batch_of_the_same_sizes_gets_the_same_object_anew():
    inputs, buffer = StepInputs(2, torch.device("cpu")), staged()

    def of(now: SimpleNamespace):
        step = step_with(no_padding(2, 2), len(now.req_ids))
        return inputs.of_step(now, SimpleNamespace(step=step, staged=buffer), False)

    others = SimpleNamespace(**vars(DECODES) | {"req_ids": ["b", "c"], "has_prefill": True})
    alone = SimpleNamespace(
        **vars(DECODES) | {"req_ids": ["c"], "num_tokens": 1, "idx_mapping_np": np.array([2])}
    )
    first = of(DECODES)
    assert of(others) is first and first.req_ids == ["b", "c"] and first.has_prefill
    assert of(DECODES) is first and first.req_ids == ["a", "b"] and not first.has_prefill
    assert of(alone) is not first and of(alone).num_reqs == 1
    assert of(DECODES).num_reqs == 2
