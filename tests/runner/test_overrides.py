"""The runner is overrides of upstream's methods, which upstream calls as it calls its own."""

import inspect

import pytest
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_npu_prep.runner.model_runner import NPUModelRunner

METHODS = {name: each for name, each in vars(NPUModelRunner).items() if inspect.isfunction(each)}
OVERRIDES = sorted(name for name in METHODS if hasattr(GPUModelRunner, name) and name != "__init__")
OWN = {
    "__init__",
    "_step_batch",
    "_begin_step",
    "_end_step",
    "_observe",
    "_dispatch",
    "_prepare_dummy",
    "_backup_next_token_ids",
    "_block_table_of_group",
    "_update_others",
    "refuse_new_weights",
    "warm_up",
    "features_of",
}
"""What is no override; a part is the better place for most things."""


def parameters(method) -> list[inspect.Parameter]:
    return list(inspect.signature(method).parameters.values())


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_takes_what_upstreams_method_takes(name):
    ours, theirs = parameters(METHODS[name]), parameters(getattr(GPUModelRunner, name))
    kinds = {each.kind for each in ours}
    passes_on = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    named = {each.name: each.default for each in ours if each.kind not in (2, 4)}
    expected = {each.name: each.default for each in theirs}
    if passes_on:  # the others as they are
        assert named.items() <= expected.items()
    else:
        assert list(named.items()) == list(expected.items())


def test_the_runner_is_overrides_and_little_else():
    assert METHODS.keys() - OVERRIDES == OWN
    assert not [name for name, each in vars(NPUModelRunner).items() if isinstance(each, property)]
