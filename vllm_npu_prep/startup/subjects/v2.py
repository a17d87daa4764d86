"""What vLLM's Model Runner V2 can't do here yet, and V1 can.

An engine that the environment leaves the choice takes V2, unless a refusal of `V1_HAS` or of
`V1_HAS_DRAFTS` applies: then it takes V1, for that reason. If the environment asks for V2, all of
them are refusals.
"""

import contextlib
import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vllm_npu_prep.startup.asked import RequestedEngine
from vllm_npu_prep.startup.refusal import NOT_SUPPORTED, Refusal, Subject

BY_V1 = "unset VLLM_USE_V2_MODEL_RUNNER: V1 has it"


@functools.cache
def _installed_processors() -> tuple[EntryPoint, ...]:
    from vllm.v1.worker.gpu.sample.logits_processor.loader import LOGITSPROCS_GROUP

    return tuple(entry_points(group=LOGITSPROCS_GROUP))


def _processors_of_v1(asked: RequestedEngine) -> list[str]:
    """Return the names of users' logits processors that V2's sampler can't call.

    One that can't be loaded is left to vLLM, which says why.
    """
    given: list[Any] = [*(asked.model.logits_processors or ()), *_installed_processors()]
    if not given:
        return []
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

    kinds = []
    for each in given:
        with contextlib.suppress(Exception):
            entry = EntryPoint(each, each, "") if isinstance(each, str) else each
            kinds.append(entry if isinstance(entry, type) else entry.load())
    kinds = [kind for kind in kinds if isinstance(kind, type)]
    return [kind.__name__ for kind in kinds if not issubclass(kind, LogitsProcessor)]


V1_HAS = (
    Refusal(
        "v2-logits-processors",
        _processors_of_v1,
        "Model Runner V2 with the logits processors {names}",
        "they have the interface of V1's sampler, and V2's has another",
        BY_V1,
        lambda c: {"names": ", ".join(_processors_of_v1(c))},
    ),
    Refusal(
        "v2-kept-kernels",
        lambda c: c.options.triton_kernels == "keep",
        "Model Runner V2 with triton_kernels keep",
        "its sampler was tested with its Triton kernels replaced",
        "leave the option out, or unset VLLM_USE_V2_MODEL_RUNNER",
    ),
)

V1_HAS_DRAFTS = (
    Refusal(
        "v2-unpadded-drafter-batch",
        lambda c: c.speculative.disable_padded_drafter_batch,
        "Model Runner V2 with disable_padded_drafter_batch",
        "its first draft pass includes rejected tokens, and drafts the same tokens",
        f"leave the key out, or {BY_V1}, except for draft models",
    ),
)


def reason_for_v1(asked: RequestedEngine) -> str:
    """Return what an engine is asked for that V1 has and V2 hasn't, and why; empty if nothing."""
    speculates = asked.config.speculative_config is not None
    for refusal in V1_HAS + V1_HAS_DRAFTS * speculates:
        if refusal.when(asked):
            return refusal.cause(asked, NOT_SUPPORTED)
    return ""


def _has_v2(asked: RequestedEngine) -> bool:
    """Tell whether the engine has V2.

    vLLM takes V2 by itself for watermarks, which have a refusal of their own.
    """
    return asked.config.use_v2_model_runner and asked.config.watermark_config is None


SUBJECTS = (
    Subject("model-runner-v2", V1_HAS, when=_has_v2),
    Subject(
        "model-runner-v2-speculation",
        V1_HAS_DRAFTS,
        when=lambda c: _has_v2(c) and c.config.speculative_config is not None,
    ),
)
