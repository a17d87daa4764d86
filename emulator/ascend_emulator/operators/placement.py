"""Which tensors are on the host. References see CPU tensors alone, so the runtime has to ask."""

from collections.abc import Mapping

from ascend_emulator.operators.atb_attention import (
    FLASH_ATTENTION,
    PAGED_ATTENTION,
    PAGED_ATTENTION_WORKSPACE,
    SPLITFUSE,
)
from ascend_emulator.operators.constraint import Constraint, Enforced, Family

HOST_ARGUMENTS = {
    FLASH_ATTENTION: ("seq_len",),
    PAGED_ATTENTION: ("context_lens",),
    PAGED_ATTENTION_WORKSPACE: ("context_lens",),
    SPLITFUSE: ("context_lens", "seq_len"),
}
"""Tensor arguments that are read on the host, by operator; all others are on the device."""

NAME = "placement"
PLACEMENT = Family(
    NAME,
    [
        Constraint(
            operator=NAME,
            argument="seq_len, context_lens",
            name="host tensor",
            demand="a tensor on the host",
            docstring_says="an array of integers in the v2 operators",
            practice="CPU tensors; on 310P context_lens of splitfuse moves to the device",
            source=(
                "vllm-project/vllm-ascend; the wheel's adapter passes a CPU tensor as hostData, "
                "and atb reports 'tensor.hostData is null' otherwise"
            ),
            enforced=Enforced.PRACTICE,
            why="the kernels are planned on the host from these lengths",
        ),
        Constraint(
            operator=NAME,
            argument="every other tensor",
            name="device tensor",
            demand="a tensor on the device",
            docstring_says="'Device Tensor' in the atb docstrings; not stated elsewhere",
            practice="the same",
            source="none needed",
            enforced=Enforced.AGREED,
        ),
    ],
)


def check_placement(operator: str, on_host: Mapping[str, bool], overload: str = "") -> None:
    """Refuse tensors on the wrong side; `on_host` says of each tensor whether it is on the host.

    Raises
    ------
    KernelRefusalError
        If one is; it names the argument.
    """
    call = PLACEMENT.call(f"{operator}.{overload}" if overload else operator)
    for argument, is_host in on_host.items():
        wants_host = argument in HOST_ARGUMENTS.get(operator, ())
        name = "host tensor" if wants_host else "device tensor"
        call.demand(name, is_host == wants_host, "host" if is_host else "device", argument)
