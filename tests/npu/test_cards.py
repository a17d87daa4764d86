"""What the pytest outside says of tests whose card says too little."""

from types import SimpleNamespace

import pytest

from tests.npu import conftest


class Card:
    """A card that is running."""

    has_reported, end = True, ""

    def run(self, test, following):
        yield from ()

    def close(self):
        return self.end


class DeadCard(Card):
    has_reported, end = False, "exit code 139, after its last words"

    def run(self, test, following):
        raise EOFError("it is gone")


@pytest.fixture
def reports_of(request, monkeypatch):
    """Outcomes of a test on such a card, and why it failed."""
    monkeypatch.setattr(conftest, "_cards", {})
    monkeypatch.setattr(conftest, "_broken", {})
    item = SimpleNamespace(nodeid="a", location=("a", 0, "a"), keywords={}, config=request.config)

    def reports_of(card: Card) -> tuple[list[str], str]:
        conftest._cards["9.1"] = card
        reports = list(conftest.reports_of("9.1", item, None))
        return [report.outcome for report in reports], str(reports[0].longrepr)

    return reports_of


FAILED = ["failed", "passed"]  # the call, and the end of a test that pytest waits for


def test_a_test_of_which_a_card_says_nothing_fails(reports_of):
    assert reports_of(Card()) == (FAILED, "the card says nothing of this test")


def test_a_card_that_ends_fails_the_test_that_ran(reports_of):
    outcomes, why = reports_of(DeadCard())
    assert outcomes == FAILED
    assert "it is gone" in why and "after its last words" in why
    assert reports_of(Card()) == (FAILED, why)  # a card that never came so far is not begun again
