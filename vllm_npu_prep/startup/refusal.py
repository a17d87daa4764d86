"""A refusal as data: when it applies, what it says, and what it has in common with others."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from vllm_npu_prep.aclnn import release_with
from vllm_npu_prep.startup.asked import RequestedEngine

NOT_SUPPORTED = " is not supported by vllm_npu_prep"
"""The verdict about a feature. For one of several values, the reason is enough."""


def _no_words(asked: RequestedEngine) -> dict[str, object]:
    return {}


def words_of_functions(asked: RequestedEngine, operators: Iterable[str]) -> dict[str, object]:
    """Return the words of a message about functions that CANN lacks.

    They are its version, the functions' names, and the first release that has all of them.
    """
    functions = sorted(set(asked.functions_missing_for(*operators).values()))
    return {
        "version": asked.cann or "(of unknown version)",
        "functions": ", ".join(functions),
        "release": release_with(functions),
    }


def _always(asked: RequestedEngine) -> bool:
    return True


@dataclass(frozen=True)
class Refusal:
    """One unsupported feature or value.

    Its texts are templates for `str.format`, filled from `words`; ``{model}``, the model's name,
    and ``{family}``, the kernel family's name, are always available.
    """

    id: str  # name that never changes: tests and the list of vLLM's fields refer to it
    when: Callable[[RequestedEngine], object]  # whether an engine was asked for it
    feature: str  # what was asked for: the flag with its value, or the feature
    reason: str  # why it is not supported, or which values are
    remedy: str = "leave the flag out"  # what to do instead
    # Values for the holes of the texts, by name
    words: Callable[[RequestedEngine], dict[str, object]] = _no_words

    def message(self, asked: RequestedEngine, verdict: str) -> str:
        return f"{self.cause(asked, verdict)}; {self._filled(self.remedy, asked)}"

    def cause(self, asked: RequestedEngine, verdict: str) -> str:
        """Return the message without the remedy."""
        return self._filled(f"{self.feature}{verdict}: {self.reason}", asked)

    def _filled(self, template: str, asked: RequestedEngine) -> str:
        words = {"model": asked.model.model, "family": asked.family.name, **self.words(asked)}
        return template.format(**words)


@dataclass(frozen=True)
class Subject:
    """Refusals about one thing, and when they are looked at.

    Attributes
    ----------
    when
        If this is false, no `Refusal.when` is called: without a drafter, for example, the
        attributes that it reads don't exist.
    """

    name: str  # names its table in docs/reference/errors.md
    refusals: tuple[Refusal, ...]  # in the order in which they are reported
    when: Callable[[RequestedEngine], object] = _always
    # Comes after the feature in each message: `NOT_SUPPORTED`, or nothing
    verdict: str = NOT_SUPPORTED

    def that_apply(self, asked: RequestedEngine) -> Iterator[tuple[Refusal, str]]:
        if self.when(asked):
            for refusal in self.refusals:
                if refusal.when(asked):
                    yield refusal, refusal.message(asked, self.verdict)
