"""Which of vLLM's kernels are replaced, when, and by whose choice."""

from types import SimpleNamespace

import pytest
from vllm.model_executor.warmup.jit_warmup_triton_helper import VllmTritonJitKernel
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode import utils

from vllm_npu_prep.ops import register_overrides
from vllm_npu_prep.worker import NPUWorker

REFUSED = {"_copy_and_expand_dflash_inputs"}
"""Launchers of drafters that start-up refuses."""


@pytest.mark.parametrize("module", [utils, rejection_sampler], ids=["drafters", "verification"])
def test_every_launcher_reaches_a_replacement(module):
    register_overrides("replace")
    launchers = {k: v for k, v in vars(module).items() if isinstance(v, VllmTritonJitKernel)}
    assert len(launchers) >= 4
    for name, launcher in launchers.items():
        assert isinstance(launcher.kernel, KernelOverride) == (name not in REFUSED), name


def test_kept_kernels_are_left_alone(monkeypatch):
    overridden = []
    monkeypatch.setattr("vllm_npu_prep.compat.kernels.override_triton_kernels", overridden.append)
    register_overrides("keep")
    assert not overridden
    register_overrides("replace")
    assert len(overridden) == 1


@pytest.mark.parametrize("option", ["replace", "keep"])
def test_a_worker_registers_first_of_all_and_as_the_option_says(option, monkeypatch):
    class RegisteredError(Exception):
        """Nothing of the worker exists yet."""

    def register(triton_kernels):
        raise RegisteredError(triton_kernels)

    monkeypatch.setattr("vllm_npu_prep.worker.register_overrides", register)
    worker = object.__new__(NPUWorker)
    options = {"npu_prep": {"triton_kernels": option}}
    worker.vllm_config = SimpleNamespace(additional_config=options)
    worker.parallel_config = SimpleNamespace(use_ray=False)
    with pytest.raises(RegisteredError, match=option):
        worker.init_device()
