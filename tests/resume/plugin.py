"""pytest in slices: what has a result is left out, and nothing is begun when the time is up.

The process that collects results is told of the tests by its workers, which run them. Both ways,
with workers (xdist) and without, a test is recorded when its last phase has ended.
"""

import time
from typing import Any

import pytest

from tests.resume.slice import Slice

NAME = "npu_prep_slice"
"""What the share is called: as a plugin, and in what a worker is given."""


class Share:
    """Where tests are run: leaves out the ids that are `done`, begins nothing past the deadline.

    `done` is fixed when the slice begins: a worker that takes the place of a crashed one has to
    collect the same tests. It passes over those of `over`: with ``loadfile``, xdist gives a test
    that ended a worker to the next worker. Files of the tests `first` come first.
    """

    def __init__(
        self, deadline: float, done: list[str], first: list[str], over: list[str] | None = None
    ) -> None:
        self.deadline, self.done = deadline, set(done)
        self.first, self.over = set(first), set(over or [])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.done])
        files = {unit.partition("::")[0] for unit in self.first}
        items[:] = [item for item in items if item.nodeid not in self.done]
        items.sort(key=lambda item: item.nodeid.partition("::")[0] not in files)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Pass over a test once the time is up."""
        return True if time.time() > self.deadline or item.nodeid in self.over else None


class Recorder:
    """Where results come together: records them, and shares out what is to be done.

    `collected` are the ids that were to be run, None before they are known; `unreadable` are files
    that could not be collected: workers run the tests of the others.
    """

    def __init__(self, part: Slice) -> None:
        self.part = part
        self.collected: list[str] | None = None
        self.unreadable: set[str] = set()
        self.phases: dict[str, list[Any]] = {}
        again = [result.unit for result in part.latest.values() if part.again(result)]
        done = sorted(set(part.latest) - set(again))
        self.share = {"deadline": part.deadline, "done": done, "first": sorted(again)}
        self.told = time.time()

    def pytest_configure(self, config: pytest.Config) -> None:
        if not config.getoption("numprocesses", None):  # otherwise workers have a share each
            config.pluginmanager.register(Share(**self.share), NAME)
        self.terminal = config.pluginmanager.get_plugin("terminalreporter")

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
        if report.failed:
            self.unreadable.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        phases = self.phases.setdefault(report.nodeid, [])
        phases.append(report)
        if report.when in ("setup", "call"):
            return
        # Torn down, or a worker died of it: such a report belongs to no phase.
        del self.phases[report.nodeid]
        outcomes = {phase.outcome for phase in phases}
        outcome = next(name for name in ("failed", "skipped", "passed") if name in outcomes)
        self.part.record(report.nodeid, outcome, sum(phase.duration for phase in phases))
        if self.terminal is not None and time.time() - self.told > 30:
            self.told = time.time()
            self.terminal.ensure_newline()
            self.terminal.write_line(self.progress())

    def progress(self) -> str:
        played, collected = self.part.played, self.collected or []
        failed = sum(result.failed for result in played)
        return (
            f"{len(played):,} of {len(collected):,} ({len(self.share['done']):,} before), "
            f"{failed} failed, {max(self.part.seconds_left, 0) / 60:.0f} min left"
        )

    def left(self) -> int | None:
        """How many of the collected tests have no result; None if none were collected."""
        if self.collected is None:
            return None
        return len(set(self.collected) - {result.unit for result in self.part.played})

    def record_gone(self) -> None:
        """Record that tests which had failed are no longer there."""
        for unit in sorted(set(self.share["first"]) - set(self.collected or [])):
            self.part.record(unit, "gone", 0)


def configure_worker(config: pytest.Config) -> None:
    """Give a worker its share, if there is a slice."""
    share = getattr(config, "workerinput", {}).get(NAME)
    if share is not None:
        config.pluginmanager.register(Share(**share), NAME)
