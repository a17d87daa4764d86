"""The side of `tests.npu.cards` on a card: a plugin of pytest that runs the tests it is told."""

import os
from contextlib import suppress
from multiprocessing.connection import Connection

import pytest

outside = Connection(os.dup(0))  # before pytest takes the standard input away


class RunsWhatItIsTold:
    """In place of pytest's own loop over all tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None  # tests could not be collected: pytest says so
        items = {item.nodeid: item for item in session.items}
        with suppress(EOFError):  # nobody is there any more
            while True:
                test, following = outside.recv()
                hook, nextitem = items[test].ihook, items.get(following)
                hook.pytest_runtest_protocol(item=items[test], nextitem=nextitem)
                outside.send(None)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        outside.send(hook.pytest_report_to_serializable(config=self.config, report=report))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RunsWhatItIsTold(config))
