"""Upstream's names point at a step's arrays, and at upstream's own memory again."""

from types import SimpleNamespace

import pytest
import torch

from vllm_npu_prep.device.cpu import CPUDevice
from vllm_npu_prep.device.staging import StagingRing
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.runner.v1.upstream_buffers import GRAPH_INPUTS, UpstreamBuffers

TENSORS = ("positions", "seq_lens", "num_computed_tokens", "optimistic_seq_lens_cpu")


def buffer(size: int) -> SimpleNamespace:
    """A host and a device side, as upstream's ``CpuGpuBuffer`` has them."""
    cpu = torch.zeros(size, dtype=torch.int32)
    return SimpleNamespace(cpu=cpu, gpu=torch.zeros(size, dtype=torch.int32), np=cpu.numpy())


def upstream(mrope: bool) -> SimpleNamespace:
    names = ["input_ids", "query_start_loc", "discard_request_mask"]
    names += ["mrope_positions"] if mrope else []
    tensors = {name: torch.zeros(16, dtype=torch.int32) for name in TENSORS}
    return SimpleNamespace(**tensors, **{name: buffer(16) for name in names}, other="untouched")


def places(runner: SimpleNamespace) -> dict[str, int]:
    """Where everything lies that a name stands for."""
    found = {}
    for name, value in vars(runner).items():
        sides = vars(value) if isinstance(value, SimpleNamespace) else {"": value}
        for side, array in sides.items():
            if isinstance(array, torch.Tensor):
                found[f"{name} {side}".strip()] = array.data_ptr()
            elif side == "np":
                found[f"{name} np"] = array.ctypes.data
    return found


@pytest.mark.parametrize("mrope", [False, True])
def test_names_are_bound_to_the_step_and_given_back(mrope):
    runner = upstream(mrope)
    before = places(runner)
    names = dict(vars(runner))
    names.pop("other")
    buffers = UpstreamBuffers(vars(runner), **({"mrope_positions": None} | names))
    layout = StepLayout(4, 2, EngineShape(mrope_dims=3 if mrope else 0))
    staged = StagingRing(CPUDevice(), layout.nbytes()).acquire(layout)
    buffers.bind(staged)
    bound = places(runner)
    device, host = staged.device, staged.cpu
    assert bound["seq_lens"] == device.seq_lens.data_ptr()
    assert bound["optimistic_seq_lens_cpu"] == host.seq_lens.data_ptr()
    assert bound["input_ids gpu"] == device.input_ids.data_ptr()
    assert bound["query_start_loc np"] == bound["query_start_loc cpu"]
    assert bound["query_start_loc np"] == host.query_start_loc.data_ptr()
    unchanged = {name for name in before if before[name] == bound[name]}
    assert unchanged == ({"mrope_positions cpu", "mrope_positions np"} if mrope else set())

    buffers.restore(leave=GRAPH_INPUTS)
    left = places(runner)
    kept = {name for name in left if name.split()[0] in GRAPH_INPUTS}
    assert {name: left[name] for name in kept} == {name: bound[name] for name in kept}
    assert all(left[name] == before[name] for name in before.keys() - kept)

    buffers.restore()
    assert places(runner) == before
    assert runner.other == "untouched"
