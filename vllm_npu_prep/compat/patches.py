"""How a patch takes the place of a method or a function of vLLM's."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def instead_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put the decorated function in the place of `owner`'s, once in a process.

    Its first argument is what it replaces; the others are those of the call. `owner` is a class or
    a module, and a method of a class stays static or a class method.
    """
    held = inspect.getattr_static(owner, name)
    upstream: Any = getattr(held, "__func__", held)

    def put(ours: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            return ours(upstream, *args, **kwargs)

        if not hasattr(upstream, "is_patched"):
            # A module's function has no frame between: some run once for each block.
            new: Any = method if isinstance(owner, type) else functools.partial(ours, upstream)
            functools.update_wrapper(new, upstream)
            new.is_patched = True
            setattr(owner, name, new if upstream is held else type(held)(new))
        return ours

    return put
