"""Which tensors are on the host. References see CPU tensors alone, so the runtime has to ask."""

from collections.abc import Mapping

from ascend_emulator.operators.atb_attention import (
    FLASH_ATTENTION,
    PAGED_ATTENTION,
    PAGED_ATTENTION_WORKSPACE,
    SPLITFUSE,
)
from ascend_emulator.operators.constraint import Call

HOST_ARGUMENTS = {
    FLASH_ATTENTION: ("seq_len",),
    PAGED_ATTENTION: ("context_lens",),
    PAGED_ATTENTION_WORKSPACE: ("context_lens",),
    SPLITFUSE: ("context_lens", "seq_len"),
}
"""Tensor arguments that are read on the host, by operator; all others are on the device."""


def check_placement(operator: str, on_host: Mapping[str, bool], overload: str = "") -> None:
    """Refuse tensors on the wrong side; `on_host` says of each tensor whether it is on the host.

    Raises
    ------
    KernelRefusalError
        If one is; it names the argument.
    """
    call = Call("placement", f"{operator}.{overload}" if overload else operator)
    for argument, is_host in on_host.items():
        wants_host = argument in HOST_ARGUMENTS.get(operator, ())
        name = "host tensor" if wants_host else "device tensor"
        call.demand(name, is_host == wants_host, "host" if is_host else "device", argument)
