"""Overrides of operators at torch's dispatcher, through which eager and captured calls pass."""

from collections.abc import Callable
from typing import Any

import torch

DEVICE = "PrivateUse1"
"""The key under which torch_npu has its kernels. What traces or differentiates has other keys."""

Choice = Callable[[tuple[Any, ...], dict[str, Any]], Callable[..., Any] | None]
"""Takes a call's arguments; returns what makes it in place of the kernel, or None for the kernel.
"""


class Overrides:
    """Operators of which another function makes some calls, until `end`."""

    def __init__(self) -> None:
        self._libraries: list[torch.library.Library] = []

    def add(self, operator: torch._ops.OpOverload, choose: Choice) -> None:
        """Let `choose` decide, for each call on a device, whether its kernel makes it.

        The kernel is taken before, so a call that it makes isn't asked about again.
        """
        kernel = torch.library.get_kernel(operator, DEVICE)

        def guard(keys: Any, *args: Any, **kwargs: Any) -> Any:
            other = choose(args, kwargs)
            if other is None:
                return kernel.call_boxed(keys, *args, **kwargs)
            return other(*args, **kwargs)

        library = torch.library.Library(operator.namespace, "IMPL")
        name = operator._name.partition("::")[2]
        library.impl(name, guard, DEVICE, with_keyset=True, allow_override=True)
        self._libraries.append(library)

    def end(self) -> None:
        """Give each operator its own kernel back."""
        while self._libraries:
            self._libraries.pop()._destroy()
