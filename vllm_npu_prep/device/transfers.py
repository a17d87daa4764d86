"""Copies between the device and the host for which no step waits."""

from collections.abc import Iterable
from typing import Protocol

import torch


class Transfer(Protocol):
    """Copies that were issued together."""

    def is_done(self) -> bool:
        """Return whether all have ended, without waiting."""

    def wait(self) -> None:
        """Wait on the host until all have ended."""


class CopyStream(Protocol):
    """A stream of copies, in order, beside the stream that computes."""

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """Issue copies ``target, source`` that begin after all work issued so far.

        Host tensors come from `vllm_npu_prep.device.host_memory`. Work that is issued later doesn't
        wait for the copies: a user of a target has to ask `Transfer.is_done` first.
        """


class DoneTransfer:
    """Copies of the CPU fallback, which have ended when they are issued."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None: ...  # there is nothing to wait for
