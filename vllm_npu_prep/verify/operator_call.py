"""One call of an operator, and the formula that it is held against."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Put = Callable[[torch.Tensor], torch.Tensor]
Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Probe:
    """One call of an operator.

    Attributes
    ----------
    call
        Takes a function that puts a tensor on the device, and returns results on the device.
    expected
        Returns the same results by a formula, in float64 on the host.
    """

    call: Callable[[Put], Results]
    expected: Callable[[], Results]
