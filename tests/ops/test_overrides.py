"""Which of vLLM's kernels are replaced, when, and by whose choice."""

import importlib
import inspect
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

    def register(triton_kernels, for_v2_runner):
        assert not for_v2_runner
        raise RegisteredError(triton_kernels)

    monkeypatch.setattr("vllm_npu_prep.worker.register_overrides", register)
    worker = object.__new__(NPUWorker)
    options = {"npu_prep": {"triton_kernels": option}}
    worker.vllm_config = SimpleNamespace(additional_config=options)
    worker.parallel_config = SimpleNamespace(use_ray=False)
    worker.model_config = SimpleNamespace(is_hybrid=False, hf_text_config=None)
    worker.use_v2_model_runner = False
    with pytest.raises(RegisteredError, match=option):
        worker.init_device()


REACHED = {
    "input_batch": (),  # inputs are the fused pass's
    "block_table": (),
    "buffer_utils": (),
    "structured_outputs": ("_apply_grammar_bitmask_kernel",),
    "sample.gumbel": ("_temperature_kernel",),  # the sampler draws by itself
    "sample.min_p": ("_min_p_kernel",),
    "sample.penalties": ("_bincount_kernel", "_penalties_kernel"),
    "sample.logit_bias": ("_bias_kernel",),
    "sample.bad_words": ("_bad_words_kernel",),
    "sample.logprob": (
        "_fill_logprob_token_ids_kernel",
        "_ranks_kernel",
        "_topk_log_softmax_kernel",
    ),
    "sample.thinking_budget": (),  # budgets are counted by a state of our own
    "sample.prompt_logprob": ("_prompt_logprobs_token_ids_kernel",),
}
"""Kernels that an engine of the V2 runner launches, by module of upstream's runner."""


@pytest.mark.parametrize("name", REACHED)
def test_kernels_of_v2_are_replaced_where_they_are_launched(name):
    register_overrides("replace", for_v2_runner=True)
    module = importlib.import_module(f"vllm.v1.worker.gpu.{name}")
    replaced = {k for k, v in vars(module).items() if isinstance(v, KernelOverride)}
    assert replaced == set(REACHED[name])
    for kernel in replaced:
        given = vars(module)[kernel]
        own = inspect.signature(given.func).parameters
        names = [name for name, each in own.items() if each.kind is not each.VAR_KEYWORD]
        kernels = [name for name in given.arg_names if not name.isupper()]
        assert len(names) == len(kernels), (kernel, names, kernels)
