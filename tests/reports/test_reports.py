"""Public reports of vLLM, vllm-ascend, SGLang and others: none of them holds here.

Tables have an entry for each, one driver plays all, and reports of one engine share its start.
"""

import contextlib
from itertools import groupby

import pytest

from tests.helpers.v2 import RUNNERS
from tests.reports.driver import hold, start
from tests.reports.engines import ENGINES
from tests.reports.tables import REPORTS


class Started:
    """The engine that runs, one at a time; one on which a report failed is not used again."""

    def __init__(self):
        self._stack, self._key, self._engine = contextlib.ExitStack(), None, None

    def get(self, name, runner):
        if self._key != (name, runner):
            self.stop()
            self._engine = self._stack.enter_context(start(name, runner))
            self._key = name, runner
        return self._engine

    def stop(self):
        self._key = self._engine = None
        self._stack.close()


@pytest.fixture(scope="module")
def started():
    started = Started()
    yield started
    started.stop()


def cases(failed):
    """Each report with V2 and with V1, those of an engine one after another."""
    places = list(ENGINES)
    reports = [report for report in REPORTS if report.failed == failed]
    reports.sort(key=lambda report: (places.index(report.engine), bool(report.known)))
    for _, group in groupby(reports, key=lambda report: report.engine):
        of_engine = list(group)
        for runner in RUNNERS:
            for report in of_engine:
                fails = pytest.mark.xfail(reason=report.known, strict=True)
                marks = [fails] if report.known else []
                name = f"{report.number} {report.title}" + ("-V2" if runner == "V2" else "")
                yield pytest.param(report, runner, marks=marks, id=name)


def play(report, runner, started):
    engine = started.get(report.engine, runner)
    try:
        hold(report, engine)
    except BaseException:
        started.stop()
        raise


@pytest.mark.parametrize(("report", "runner"), list(cases(failed=True)))
def test_what_failed_once_holds_no_more(report, runner, started):
    play(report, runner, started)


@pytest.mark.parametrize(("report", "runner"), list(cases(failed=False)))
def test_no_report_holds_here(report, runner, started):
    play(report, runner, started)


def test_each_report_is_told_once():
    assert len({(each.number, each.title) for each in REPORTS}) == len(REPORTS)
    assert {each.engine for each in REPORTS} <= set(ENGINES)
