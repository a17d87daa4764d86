"""Plugin of pytest for planted bugs: the order of tests, the time of each, and which one failed.

Tests run in the order in which the command names their files and folders. One that does not end,
even in compiled code, ends the process: a loop by its processor time, as others may use the
machine, and what waits by the clock.
"""

import signal

import pytest
from hypothesis import Phase, settings

BUSY, WAITING = 240, 1800
"""Seconds of a test with its fixtures."""
_failed: list[str] = []


def pytest_configure():
    """Take any example that fails: to look for the smallest would take longer than all else."""
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("npu_prep_planted", settings(), phases=phases)
    settings.load_profile("npu_prep_planted")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    signal.setitimer(signal.ITIMER_PROF, BUSY)  # nobody handles these: the process ends
    signal.alarm(WAITING)
    result = yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    return result


@pytest.hookimpl(trylast=True)  # after the suite's own order
def pytest_collection_modifyitems(config, items):
    named = [word.partition("::")[0] for word in config.args]

    def place(item) -> int:
        file = item.nodeid.partition("::")[0]
        return next(n for n, name in enumerate(named) if f"{file}/".startswith(f"{name}/"))

    items.sort(key=place)


def pytest_runtest_logreport(report):
    if report.failed:
        _failed.append(report.nodeid)


def pytest_collectreport(report):
    if report.failed:
        _failed.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    from tests.mutants.bench import FIRST

    for test in _failed[:1]:  # a line of its own: names of cases have spaces
        print(f"\n{FIRST}{test}", flush=True)
