"""What the emulated device is asked to do while a step is prepared."""

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import ascend_emulator


class PreparationCounts:
    """Counts of each step of a runner, from entering `_prepare_inputs` to entering the forward.

    `steps` holds one dict a step; counters that stayed at zero are left out.
    """

    def __init__(self, runner: Any) -> None:
        self.steps: list[dict[str, int]] = []
        self._start: dict[str, int] = {}
        if hasattr(runner, "_model_forward"):
            forwards = [(runner, "_model_forward")]
        else:
            forwards = [(runner.model, "forward"), (runner.cudagraph_manager, "run_fullgraph")]
        prepare_inputs = runner._prepare_inputs

        def counted_prepare_inputs(*args: Any) -> Any:
            self._start = asdict(ascend_emulator.counters())
            return prepare_inputs(*args)

        def counted_model_forward(model_forward: Any, *args: Any, **kwargs: Any) -> Any:
            if self._start:  # dummy runs prepare nothing
                end = asdict(ascend_emulator.counters())
                counts = {name: end[name] - start for name, start in self._start.items()}
                self.steps.append({name: count for name, count in counts.items() if count})
                self._start = {}
            return model_forward(*args, **kwargs)

        runner._prepare_inputs = counted_prepare_inputs
        for runs, forward in forwards:
            setattr(runs, forward, partial(counted_model_forward, getattr(runs, forward)))


class ModuleCounts:
    """Counts of a model's modules, by name, in the last forward that called them.

    A module's own counts include those of the modules in it.
    """

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        for name in names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            module.register_forward_hook(self._after(name), always_call=True)

    def _before(self, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self.counts[name] = asdict(ascend_emulator.counters())

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            end, start = asdict(ascend_emulator.counters()), self.counts[name]
            counts = {key: end[key] - start[key] for key in start if key != "peak_memory_bytes"}
            self.counts[name] = {key: count for key, count in counts.items() if count}

        return hook
