"""Patches of vLLM's Model Runner V2: who gets it, its demands on a host, and names that can't be
passed in."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_npu_prep.compat.releases import is_since
from vllm_npu_prep.errors import PrepError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.states import SamplingStates

RUNNER_ENV_VAR = "VLLM_USE_V2_MODEL_RUNNER"
FOLDER = "vllm.v1.worker.gpu"
"""Package of upstream's V2 runner."""


def read_choice() -> None:
    """Write the choice of a runner as vLLM reads it, as a number; refuse what is none."""
    given = os.environ.pop(RUNNER_ENV_VAR, "")
    choices = {"1": "1", "true": "1", "0": "0", "false": "0", "": ""}
    chosen = choices.get(given.strip().lower())
    if chosen is None:
        raise PrepError(
            f"{RUNNER_ENV_VAR}={given!r} is no choice of a model runner: set it to 1 for V2 or to "
            "0 for V1, or unset it: then V2 runs what it has, and V1 the rest"
        )
    if chosen:
        os.environ[RUNNER_ENV_VAR] = chosen


def let_it_run_without_triton() -> None:
    """Keep vLLM from refusing V2 where Triton is missing: no kernel of Triton is launched here.

    vLLM's stand-in for a missing Triton also lacks a function that launchers of kernels call.
    """
    from vllm.config import vllm as config
    from vllm.triton_utils import triton

    config.HAS_TRITON = True
    if not hasattr(triton, "next_power_of_2"):
        triton.next_power_of_2 = lambda n: 1 << max(int(n) - 1, 0).bit_length()


def let_platform_choose(platform: Any) -> None:
    """Let an engine have V1 where our platform has a reason for it.

    The platform is asked unless the environment chooses. vLLM asks for the runner of a config
    whenever it wants to know, also before the platform has checked it, and in each process, so the
    answer follows from the config alone: engines of one process may have either runner.
    """
    from vllm import envs
    from vllm.config import VllmConfig

    upstream: Any = vars(VllmConfig)["use_v2_model_runner"].fget
    if hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def use_v2_model_runner(self: "VllmConfig") -> bool:
        is_open = envs.VLLM_USE_V2_MODEL_RUNNER is None and self.watermark_config is None
        return not (is_open and platform.reason_for_v1(self)) and upstream(self)

    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)  # type: ignore[assignment]


def let_workers_run_without_triton() -> None:
    """Keep vLLM 0.33.0's workers from refusing V2 where Triton is missing: they ask once more."""
    from vllm.v1.worker import gpu_worker

    asked: Any = gpu_worker  # 0.32.0 has no such name
    if is_since("0.33.0"):
        asked.HAS_TRITON = True


def top_k_and_top_p(
    states: "SamplingStates", idx_mapping: Any, request_rows: Any, vocab_size: int
) -> tuple[Any | None, Any | None]:
    """Return k and p of rows of logits; None where no request limits its tokens by it.

    `idx_mapping` has the request row of each row of logits, int64 ``[num_logits]`` on the device,
    and `request_rows` the request rows on the host, int ``[num_reqs]``. vLLM 0.33.0 also says
    whether a row has a p alone, which only its Triton kernel needs.
    """
    size: tuple[int, ...] = (vocab_size,) if is_since("0.33.0") else ()
    found: tuple[Any, ...] = states.get_top_k_top_p(idx_mapping, request_rows, *size)
    return found[0], found[1]


def modules() -> list[ModuleType]:
    return [
        module
        for name, module in sys.modules.items()
        if name == FOLDER or name.startswith(f"{FOLDER}.")
    ]


@contextlib.contextmanager
def stand_ins(**classes: Any) -> Iterator[None]:
    """Give upstream's V2 modules other classes or functions under names that they imported.

    Its runner makes request states, block tables, samplers and buffers by these names, and takes no
    others. A name is replaced in every module of upstream's package that has it. The context covers
    the construction of a part, so that nothing else sees the stand-ins.
    """
    saved = [
        (module, name, vars(module)[name])
        for module in modules()
        for name in classes
        if name in vars(module)
    ]
    try:
        for module, name, _ in saved:
            setattr(module, name, classes[name])
        yield
    finally:
        for module, name, original in saved:
            setattr(module, name, original)


@contextlib.contextmanager
def decisions_by(decide: Callable[..., Any]) -> Iterator[None]:
    """Let upstream's ``execute_model`` ask another function for a step's graph and padding.

    Upstream's runner calls ``dispatch_cg_and_sync_dp``, whose arguments the function takes, by the
    name that it imported. The context covers one call, because a drafter's module has a name of its
    own.
    """
    from vllm.v1.worker.gpu import model_runner

    module: Any = model_runner
    original = module.dispatch_cg_and_sync_dp
    module.dispatch_cg_and_sync_dp = decide
    try:
        yield
    finally:
        module.dispatch_cg_and_sync_dp = original
