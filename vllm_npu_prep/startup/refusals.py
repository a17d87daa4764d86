"""The one list of what start-up refuses; all refusals that apply are reported together."""

from typing import TYPE_CHECKING

from vllm_npu_prep.attention.families import KernelFamily
from vllm_npu_prep.device import DeviceKind
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.startup.asked import RequestedEngine
from vllm_npu_prep.startup.refusal import Refusal, Subject
from vllm_npu_prep.startup.subjects import (
    cache,
    features,
    graphs,
    inputs,
    kernels,
    ranks,
    speculation,
    states,
    v2,
    vllm_ascend,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUBJECTS: tuple[Subject, ...] = (
    *kernels.SUBJECTS,
    *graphs.SUBJECTS,
    *features.SUBJECTS,
    *states.SUBJECTS,
    *ranks.SUBJECTS,
    *cache.SUBJECTS,
    *inputs.SUBJECTS,
    *speculation.SUBJECTS,
    *v2.SUBJECTS,
    *vllm_ascend.SUBJECTS,
)
"""All subjects, in the order in which they are checked."""

REFUSALS: dict[str, Refusal] = {each.id: each for subject in SUBJECTS for each in subject.refusals}


def refusals_that_apply(
    vllm_config: "VllmConfig", family: KernelFamily, kind: DeviceKind
) -> dict[str, str]:
    """Return the messages of all refusals that apply, by id, in the order of the list."""
    asked = RequestedEngine(vllm_config, family, kind)
    found = (each for subject in SUBJECTS for each in subject.that_apply(asked))
    return {refusal.id: message for refusal, message in found}


def refuse_unsupported(vllm_config: "VllmConfig", family: KernelFamily, kind: DeviceKind) -> None:
    """Raise if the device, the kernel family or this version can't do what was asked for.

    Raises
    ------
    PrepError
        Says what was given, what is allowed and what to do: one line, or, where several refusals
        apply, a line with their number and one line for each.
    """
    messages = list(refusals_that_apply(vllm_config, family, kind).values())
    if len(messages) == 1:
        raise PrepError(messages[0])
    if messages:
        lines = [f"{len(messages)} things have to be changed:", *messages]
        raise PrepError("\n  ".join(lines))
