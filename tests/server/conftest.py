"""What servers of several files are asked."""

import pytest

from tests.server import hostile
from tests.server.process import QUESTIONS


@pytest.fixture(scope="module")
def sent(server):
    """What came of each hostile request to the server of a file, by its advisory."""
    return hostile.send_all(server, QUESTIONS[4][0])
