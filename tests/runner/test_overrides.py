"""Upstream calls the runner's overrides as it calls its own methods."""

import inspect

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_npu_prep.runner.v1.runner import NPUModelRunner
from vllm_npu_prep.runner.v1.setup import RunnerSetup


def parameters_of(method) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(method).parameters)


def test_an_override_takes_what_upstreams_method_takes():
    overrides = {
        name: (parameters_of(method), parameters_of(getattr(GPUModelRunner, name)))
        for name, method in {**vars(RunnerSetup), **vars(NPUModelRunner)}.items()
        if inspect.isfunction(method) and hasattr(GPUModelRunner, name) and name != "__init__"
    }
    others = {}
    for name, (ours, theirs) in overrides.items():
        kinds = {each.kind for each in ours.values()}
        named = [(each.name, each.default) for each in ours.values() if each.kind not in (2, 4)]
        expected = [(each.name, each.default) for each in theirs.values()]
        passes_on = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
        if not (set(named) <= set(expected) if passes_on else named == expected):
            others[name] = named, expected
    assert not others and len(overrides) > 20
