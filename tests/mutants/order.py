"""Plugin of pytest for random changes: the order of tests, and the time that each may take.

Tests run in the order in which the command names their files and folders. One that does not end,
even in compiled code, ends the process.
"""

import signal

import pytest

SECONDS = 240
"""Of a test with its fixtures, on a loaded machine too."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    signal.alarm(SECONDS)  # nobody handles it: the process ends
    result = yield
    signal.alarm(0)
    return result


@pytest.hookimpl(trylast=True)  # after the suite's own order
def pytest_collection_modifyitems(config, items):
    named = [word.partition("::")[0] for word in config.args]

    def place(item) -> int:
        file = item.nodeid.partition("::")[0]
        return next(n for n, name in enumerate(named) if f"{file}/".startswith(f"{name}/"))

    items.sort(key=place)
