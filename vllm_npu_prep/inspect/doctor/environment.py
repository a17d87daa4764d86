"""Checks the environment variables of vLLM, torch_npu, CANN and numba that matter to the plugin."""

import os
from collections.abc import Iterator
from pathlib import Path

from vllm_npu_prep.driver import EXPANDING_PINS
from vllm_npu_prep.inspect.doctor.finding import Finding, bad_if, failure, ok, warning
from vllm_npu_prep.inspect.doctor.host import Host, set_env_of

VALUES = (
    "NPU_PREP_DEVICE",
    "VLLM_PLUGINS",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_TARGET_DEVICE",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "PYTHONDONTWRITEBYTECODE",
    "NUMBA_DISABLE_JIT",
)
"""Variables that matter by their value alone."""

OF_TORCH_NPU = ("TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING", "PYTORCH_NPU_ALLOC_CONF")
"""Variables of torch_npu that decide whether graphs can be captured and replayed."""

VISIBLE_DEVICES, CACHE = "ASCEND_RT_VISIBLE_DEVICES", "NUMBA_CACHE_DIR"
RUNTIME = "libascendcl.so"
"""CANN's runtime, which torch_npu loads by name."""


def environment_findings(host: Host, num_nodes: int, cann: str | None) -> Iterator[Finding]:
    """Yield a finding for each variable that is set or has to be, and one for all unset ones.

    `num_nodes` is the number of the host's device nodes of NPUs, and `cann` the folder of CANN.
    """
    for name in VALUES:
        if name in host.environment:
            yield _value_finding(host, name)
    if VISIBLE_DEVICES in host.environment:
        yield _visible_devices(host, num_nodes)
    for name in OF_TORCH_NPU:
        if host.needs_npu and name in host.environment:
            yield _of_torch_npu(name, host.environment[name])
    yield _compiled_code(host)
    if host.needs_npu:
        yield _libraries(host, cann)
        yield _cann_home(host, cann)
    of_hccl = [f"{n}={value}" for n, value in sorted(host.environment.items()) if n[:5] == "HCCL_"]
    if of_hccl:
        yield ok("HCCL_*", f"{', '.join(of_hccl)} (not checked)")
    unset = [name for name in (*VALUES, VISIBLE_DEVICES, CACHE) if name not in host.environment]
    if unset:
        yield ok("not set", ", ".join(unset))


def _value_finding(host: Host, name: str) -> Finding:
    given = host.environment[name]
    found, value = repr(given), given.strip()
    if name == "NPU_PREP_DEVICE" and value.lower() not in ("auto", "npu", "cpu", ""):
        return failure(name, found, "set it to auto, npu or cpu")
    if name == "VLLM_PLUGINS" and "npu_prep" not in given.split(","):
        return failure(name, found, "add npu_prep, or unset it: vLLM loads the listed ones only")
    if name == "VLLM_USE_V2_MODEL_RUNNER" and value.lower() in ("0", "false"):
        return warning(
            name,
            found,
            "this chooses V1; V2 is the plugin's default: unset it to get V2; "
            "docs/guides/engine.md says what each of them lacks",
        )
    if name == "VLLM_USE_V2_MODEL_RUNNER" and value.lower() not in ("1", "true", ""):
        return failure(name, found, "set it to 1 for V2 or to 0 for V1, or unset it")
    if name == "VLLM_TARGET_DEVICE" and value != "empty":
        return warning(name, found, "set it to the word empty to build vLLM, and unset it to serve")
    if name == "VLLM_WORKER_MULTIPROC_METHOD" and value != "spawn" and host.needs_npu:
        do = "unset it: the plugin uses spawn, since a forked process can't use its parent's NPU"
        return warning(name, found, do)
    if name == "PYTHONDONTWRITEBYTECODE" and given:
        return warning(
            name,
            found,
            "unset it: without .pyc files every process compiles all modules, and starts slowly",
        )
    if name == "NUMBA_DISABLE_JIT" and value not in ("", "0"):
        return warning(
            name,
            found,
            "unset it: otherwise the code that prepares a step is not compiled, and slow",
        )
    return ok(name, found)


def _of_torch_npu(name: str, given: str) -> Finding:
    """Check a variable of torch_npu, by ``NPUGraph.cpp`` and ``OptionsManager.cpp`` of
    Ascend/pytorch.
    """
    found, value = repr(given), given.strip()
    if name == "TASK_QUEUE_ENABLE" and value not in ("0", "1"):
        bad = warning if value == "2" else failure
        do = "set it to 1: no graph can be captured with 2, which workers take for 1"
        return bad(name, found, do)
    if name == "ASCEND_LAUNCH_BLOCKING" and value != "0":
        do = "unset it to serve: torch_npu waits for each launch, and full graphs are off"
        return warning(name, found, do)
    if name == "PYTORCH_NPU_ALLOC_CONF" and EXPANDING_PINS in value:
        do = f"take {EXPANDING_PINS} out: no graph can be captured with it"
        return failure(name, found, do)
    return ok(name, found)


def _visible_devices(host: Host, num_nodes: int) -> Finding:
    name, bad = VISIBLE_DEVICES, bad_if(host.needs_npu)
    value = host.environment[name].strip()
    if not value:
        return bad(name, "empty, which hides every NPU", "unset it, or list NPUs: 0,1")
    try:
        chosen = [int(part) for part in value.split(",")]
    except ValueError:
        return bad(name, repr(value), "list numbers of NPUs, such as 0,1")
    beyond = [str(index) for index in chosen if not 0 <= index < num_nodes]
    if beyond and host.needs_npu:
        found = f"{value!r}; device nodes here: {num_nodes}"
        return bad(name, found, f"remove {', '.join(beyond)}: NPUs are numbered from 0")
    return ok(name, repr(value))


def _compiled_code(host: Host) -> Finding:
    """Check that numba can keep the compiled code of `vllm_npu_prep.prep`, which takes seconds to
    make.
    """
    chosen = host.environment.get(CACHE)
    folder = host.path(chosen) if chosen else Path(__file__).parents[2] / "prep"
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    name = CACHE if chosen else "compiled code"
    found = chosen or "kept in the plugin's own folder"
    if os.access(folder, os.W_OK):
        return ok(name, found)
    do = "set NUMBA_CACHE_DIR to a writable folder: otherwise every start compiles again"
    return warning(name, f"{found}, which can't be written", do)


def _libraries(host: Host, cann: str | None) -> Finding:
    name = "LD_LIBRARY_PATH"
    folders = [part for part in host.environment.get(name, "").split(os.pathsep) if part]
    for folder in folders:
        if host.exists(f"{folder}/{RUNTIME}"):
            return ok(name, f"has {RUNTIME} ({folder})")
    found = f"{RUNTIME} is in none of its {len(folders)} folders" if folders else "not set"
    return warning(name, found, f"source {set_env_of(cann)} before vLLM starts")


def _cann_home(host: Host, cann: str | None) -> Finding:
    names = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
    given = {name: host.environment[name] for name in names if host.environment.get(name)}
    if not given:
        return warning(names[0], "not set", f"source {set_env_of(cann)} before vLLM starts")
    for name, folder in given.items():
        if not host.exists(folder):
            do = f"source {set_env_of(cann)} of the CANN that is installed"
            return failure(name, f"{folder}, which does not exist", do)
    return ok(", ".join(given), ", ".join(given.values()))
