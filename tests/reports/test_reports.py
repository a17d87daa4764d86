"""What public reports of vLLM, vllm-ascend, SGLang and others tell of does not happen here.

Tables have an entry for each, one driver plays all, and reports of one engine share its start.
"""

import contextlib
from itertools import groupby

import pytest

from tests.helpers.v2 import RUNNERS
from tests.reports.driver import assert_right, start
from tests.reports.engines import ENGINES
from tests.reports.tables import REPORTS


class Started:
    """The engine that runs, one at a time; one on which a report failed is not used again."""

    def __init__(self):
        self._stack, self._key, self._engine = contextlib.ExitStack(), None, None

    @contextlib.contextmanager
    def engine(self, name, runner):
        if self._key != (name, runner):
            self.stop()
            self._engine = self._stack.enter_context(start(name, runner))
            self._key = name, runner
        try:
            yield self._engine
        except BaseException:
            self.stop()
            raise

    def stop(self):
        self._key = self._engine = None
        self._stack.close()


@pytest.fixture(scope="module")
def started():
    started = Started()
    yield started
    started.stop()


def cases():
    """Each report with V2 and with V1, those of an engine one after another."""
    places = list(ENGINES)
    reports = sorted(REPORTS, key=lambda report: (places.index(report.engine), report.known))
    for _, group in groupby(reports, key=lambda report: report.engine):
        of_engine = list(group)
        for runner in RUNNERS:
            for report in of_engine:
                once = "failed" if report.failed else "held"
                name = f"{once}: {report.number} {report.title}" + "-V2" * (runner == "V2")
                fails = pytest.mark.xfail(
                    raises=AssertionError, reason=f"{report.number} is open", strict=True
                )
                marks = [fails] if report.known else []
                yield pytest.param(report, runner, marks=marks, id=name)


@pytest.mark.parametrize(("report", "runner"), list(cases()))
def test_what_was_reported_does_not_happen(report, runner, started):
    with started.engine(report.engine, runner) as engine:
        answers = engine.play(report.does)
        happened = engine.happened()
        engine.assert_nothing_is_kept()
        for name, expected in report.expect.items():
            assert {what: answers[name].found(what) for what in expected} == expected
        happened["changed"] = sum(assert_right(engine, each) for each in answers.values())
        assert set(report.happened) <= set(+happened)


def test_each_report_is_told_once():
    assert len({(each.number, each.title) for each in REPORTS}) == len(REPORTS)
    assert {each.engine for each in REPORTS} <= set(ENGINES)
