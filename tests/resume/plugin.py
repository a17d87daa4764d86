"""pytest in slices: what has a result is left out, and nothing is begun when the time is up.

The process that collects results is told of the tests by its workers, which run them. Both ways,
with workers (xdist) and without, a test is recorded when its last phase has ended.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.resume.log import Slice

NAME = "npu_prep_slice"
"""What the share is called: as a plugin, and in what a worker is given."""


class Share:
    """Where tests are run: leaves out the ids that are `done`, begins nothing past the deadline.

    `done` is fixed when the slice begins: a worker that takes the place of a crashed one has to
    collect the same tests. It passes over those of `over`: with ``loadfile``, xdist gives a test
    that ended a worker to the next worker. Files of `first` come first, in this order.
    """

    def __init__(
        self, deadline: float, done: list[str], first: list[str], over: Sequence[str] = ()
    ) -> None:
        self.deadline, self.done, self.over = deadline, set(done), over
        self.first = {file: place for place, file in enumerate(dict.fromkeys(first))}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.done])
        items[:] = [item for item in items if item.nodeid not in self.done]
        last = len(self.first)
        items.sort(key=lambda item: self.first.get(item.nodeid.partition("::")[0], last))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Pass over a test once the time is up."""
        return True if time.time() > self.deadline or item.nodeid in self.over else None


class Recorder:
    """Where results come together: records them, and shares out what is to be done.

    `collected` are the ids that were to be run, None before they are known.
    """

    def __init__(self, part: Slice) -> None:
        self.part = part
        self.collected: list[str] | None = None
        self.unreadable = False
        self.phases: dict[str, list[pytest.TestReport]] = {}
        self.again = {unit for unit, result in part.latest.items() if part.again(result)}
        done = sorted(set(part.latest) - self.again)
        self.share = {"deadline": part.deadline, "done": done, "first": files_of(self.again)}

    def run(self, processes: str, chosen: Sequence[str]) -> bool:
        """Run tests until the slice's time is up; False if some could not be collected."""
        words = ["-q", "-n", processes, "--maxprocesses", "4", "--dist", "loadfile"]
        code = pytest.main([*words, "--no-loadscope-reorder", *chosen], plugins=[self])
        if code == pytest.ExitCode.NO_TESTS_COLLECTED and self.share["done"]:
            code, self.collected = pytest.ExitCode.OK, self.collected or []
        return code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not self.unreadable

    def left(self) -> int | None:
        """How many of the collected tests have no result; None if none were collected."""
        if self.collected is None:
            return None
        return len(set(self.collected) - {result.unit for result in self.part.played})

    def pytest_configure(self, config: pytest.Config) -> None:
        if not config.getoption("numprocesses", None):  # otherwise workers have a share each
            config.pluginmanager.register(Share(**self.share), NAME)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        over = [result.unit for result in self.part.played]  # none, unless it replaces another
        node.workerinput[NAME] = self.share | {"over": over}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected = list(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.collected = [item.nodeid for item in session.items]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.unreadable |= report.failed  # workers run the tests of other files

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        phases = self.phases.setdefault(report.nodeid, [])
        phases.append(report)
        if report.when not in ("setup", "call"):  # torn down, or a worker died: no phase then
            outcomes = {phase.outcome for phase in self.phases.pop(report.nodeid)}
            outcome = next(name for name in ("failed", "skipped", "passed") if name in outcomes)
            self.part.record(report.nodeid, outcome, sum(phase.duration for phase in phases))


def files_of(units: Iterable[str]) -> list[str]:
    return sorted({unit.partition("::")[0] for unit in units})


def configure_worker(config: pytest.Config) -> None:
    """Give a worker its share, if there is a slice."""
    share = getattr(config, "workerinput", {}).get(NAME)
    if share is not None:
        config.pluginmanager.register(Share(**share), NAME)
