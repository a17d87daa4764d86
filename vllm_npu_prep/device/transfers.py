"""Copies between the device and the host that nothing of a step waits for."""

from collections.abc import Iterable
from typing import Protocol

import torch


class Transfer(Protocol):
    """Copies that were issued together."""

    def is_done(self) -> bool:
        """Whether all have ended; asks, and does not wait."""

    def wait(self) -> None:
        """Wait on the host until all have ended."""


class CopyStream(Protocol):
    """A stream of copies, in order, beside the stream that computes."""

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """Issue copies ``target, source`` that begin after all work issued so far.

        Host tensors come from `vllm_npu_prep.device.host_memory`. Nothing that is issued later
        waits for the copies: whoever uses a target asks `Transfer.is_done` first.
        """


class DoneTransfer:
    """Copies of the CPU fallback, which have ended when they are issued."""

    def is_done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""
