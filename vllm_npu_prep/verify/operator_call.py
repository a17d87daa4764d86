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
        Gets a function that puts a tensor on the device; returns results on the device.
    expected
        The same by a formula, in float64 on the host.
    """

    call: Callable[[Put], Results]
    expected: Callable[[], Results]
