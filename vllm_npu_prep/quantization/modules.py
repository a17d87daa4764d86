"""Which modules of a quantised checkpoint a model has.

vLLM fuses some of a checkpoint's modules into one; such a module is known here by its parts.
"""

import functools
from collections import ChainMap
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeVar

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.checkpoint import LAYER

R = TypeVar("R")

FUSED_MODULES = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}
"""Modules that vLLM makes of several of a checkpoint's, by the same names in all models."""


class KnowsModules:
    """A quantisation config that knows fused modules, and refuses modules that a model lacks.

    Models name the parts of their fused modules, but some too late: vLLM's Qwen3-MoE names those of
    its dense layers only after they have been made. `FUSED_MODULES` is known from the beginning.
    """

    _fused: MutableMapping[str, list[str]]
    _expected: dict[str, str]  # files by module, of those that are quantised
    _made: set[str]
    _num_held = 0  # modules that had been made when they were last held against the files

    @property
    def packed_modules_mapping(self) -> MutableMapping[str, list[str]]:
        """Parts of each fused module: what the model says, its drafter's first, then the usual."""
        return self._fused

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, given: dict[str, list[str]]) -> None:
        # Models add to what they gave. A model's own MTP layers share its config, and give theirs.
        self._fused = ChainMap(given, getattr(self, "_fused", FUSED_MODULES))

    def expect(self, files: dict[str, str]) -> None:
        """Say which modules are quantised, by their names in vLLM, and which file names each."""
        self._expected, self._made, self._num_held = files, set(), 0

    def rename(self, renamed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._expected = renamed(getattr(self, "_expected", {}))

    def made(self, prefix: str) -> None:
        if not hasattr(self, "_made"):
            self._made = set()
        self._made.add(prefix)

    def before_loading(self, loader: Callable[..., R]) -> Callable[..., R]:
        """Wrap a parameter's loader: its first call holds the model's modules against the files.

        The model is complete by then, and no weight is loaded.
        """

        @functools.wraps(loader)
        def load(*args: Any, **kwargs: Any) -> R:
            if self._num_held != len(self._made):
                self._num_held = len(self._made)
                refuse_unknown(getattr(self, "_expected", {}), self._parts_of(self._made))
            return loader(*args, **kwargs)

        return load

    def _parts_of(self, made: Iterable[str]) -> set[str]:
        found = set(made)
        for prefix in made:
            parent, _, last = prefix.rpartition(".")
            found |= {f"{parent}.{part}" for part in self._fused.get(last, ())}
        return found


def refuse_unknown(expected: dict[str, str], made: set[str]) -> None:
    """Raise for the first module that a checkpoint has and the model hasn't.

    `expected` has the file that names each module. Of a mixture of experts, `made` has the module
    that all experts are in. A decoder layer of which the model has no module is left out: it is on
    another pipeline stage, or it drafts.
    """
    layers = {_start_of_layer(module) for module in made}
    for module, source in expected.items():
        start = _start_of_layer(module)
        is_experts = any(part in made for part in _parents(module))
        if start and start in layers and module not in made and not is_experts:
            raise PrepError(
                f"{source}: names {module}, a module that the model does not have; quantise the "
                "model again, or leave the module out of its files"
            )


def _start_of_layer(module: str) -> str:
    """Return a module's name up to its decoder layer; it is empty outside of decoder layers."""
    found = LAYER.search(module)
    return module[: found.end()] if found else ""


def _parents(module: str) -> Iterable[str]:
    parts = module.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))
