"""Adapters of one engine of `tests.soak`, whose folders are overwritten while requests run."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest

from tests.helpers.models import adapter_of
from tests.helpers.traffic import Traffic
from tests.soak.kinds import ADAPTERS
from vllm_npu_prep.compat.lora import once


@dataclasses.dataclass(eq=False)
class Use:
    """A request's adapter, and numbers of the weights that may have been loaded since, in order.

    Without an adapter these are 0.
    """

    request: LoRARequest | None
    weights: list[int]


class Adapters:
    """Adapters that requests choose from, each in a folder of its own; 0 is none of them."""

    def __init__(self, model: str, root: Path, number: int) -> None:
        self._model, self._uses, self._last_id = model, list[Use](), number
        self._names: list[Use] = [Use(None, [0])]
        for each in range(1, number + 1):
            adapter = LoRARequest(f"adapter {each}", each, str(root / f"adapter {each}"))
            self._names.append(Use(adapter, [each]))
            self._write(adapter, each)

    def __len__(self) -> int:
        return len(self._names)

    def use(self, number: int) -> Use:
        of_name = self._names[number]
        self._uses.append(Use(of_name.request, list(of_name.weights)))
        return self._uses[-1]

    def _write(self, adapter: LoRARequest, weights: int) -> None:
        shutil.copytree(adapter_of(self._model, weights), adapter.lora_path, dirs_exist_ok=True)

    def overwrite(self, traffic: Traffic) -> tuple[Use, LoRARequest]:
        """Overwrite a folder, and load it no sooner than the caller does.

        Returns what later requests of that name get, and the adapter as the engine knows it.
        """
        of_name = self._names[traffic.number(1, len(self) - 1)]
        assert of_name.request is not None
        adapter, weights = of_name.request, traffic.number(1, ADAPTERS)
        self._write(adapter, weights)
        for use in (*self._uses, of_name):  # a folder is read again where there was no room
            if use.request is not None and use.request.lora_path == adapter.lora_path:
                use.weights.append(weights)
        return of_name, adapter

    def change(self, traffic: Traffic, engine: Any) -> str:
        """Overwrite a folder, and load it in some way or not at all; says how."""
        of_name, adapter = self.overwrite(traffic)
        how = traffic.pick("by a call", "by the next request", "removed", "new id", "not yet")
        if how == "not yet":
            return how
        of_name.request, of_name.weights = once(adapter), of_name.weights[-1:]
        if how == "by a call":
            engine.add_lora(in_place(adapter))
        elif how == "by the next request":
            of_name.request = in_place(adapter)
        elif how == "removed":
            engine.remove_lora(adapter.lora_int_id)
        else:
            self._last_id += 1
            of_name.request = msgspec.structs.replace(once(adapter), lora_int_id=self._last_id)
        return how


def in_place(adapter: LoRARequest) -> LoRARequest:
    """The same, to be read even if it is loaded."""
    return msgspec.structs.replace(adapter, load_inplace=True)


def margin_of(use: Use, margins_of: Callable[[int], list[float]]) -> float:
    """How far an answer is from one that exchanges its weights at most once each, in their order.

    `margins_of` says how far each token is from being the best one by some weights.
    """
    costs = [0.0] * len(use.weights)
    for margins in zip(*(margins_of(weights) for weights in use.weights)):
        before = float("inf")
        for index, margin in enumerate(margins):
            before = min(before, costs[index])
            costs[index] = max(before, margin)
    return min(costs)
