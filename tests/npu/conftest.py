"""Tests of `on_device` run on an emulated card, or on the NPU of this process."""

import os
from collections.abc import Iterator

import pytest
from vllm import platforms

from tests.helpers.emulator import why_no_emulator
from tests.npu.cards import ON_A_CARD, OPTIONS, UNDER_EVERY_PROFILE, Card, card_of

if ON_A_CARD:
    os.environ["NPU_PREP_DEVICE"] = "npu"

_cards: dict[str, Card] = {}
_broken: dict[str, str] = {}
"""Cards that are running, and what was said by those which never came so far."""


def pytest_ignore_collect(collection_path):
    """Under other profiles, leave out files that have nothing to do with them."""
    name = collection_path.stem.removeprefix("test_")
    is_link = collection_path.parent.is_symlink()
    return True if is_link and name not in UNDER_EVERY_PROFILE else None


def pytest_collection_modifyitems(items):
    """Tests of cards come first, those of each together; without the emulator they are skipped.

    On a card vLLM's platform is chosen now: what it sets in the environment (how ranks start, no
    compilation ahead of time) would be gone after a test that began it under a patch of others.
    """
    if ON_A_CARD:
        assert platforms.current_platform.device_type == "npu"
    cards = [*OPTIONS, ""]
    items.sort(key=lambda item: cards.index(card_of(item.nodeid)))
    if not ON_A_CARD and (why := why_no_emulator()):
        for item in items:
            if card_of(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_runtest_protocol(item, nextitem):
    name = card_of(item.nodeid)
    if not name or ON_A_CARD or why_no_emulator():
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports_of(name, item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def reports_of(name: str, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator:
    """What the card says of a test; what is wrong with the card is said of the test that ran."""
    if name in _broken:
        yield from failed(item, _broken[name])
        return
    if name not in _cards:
        ids = [each.nodeid for each in item.session.items if card_of(each.nodeid) == name]
        _cards[name] = Card(name, ids)
    card, config = _cards[name], item.config
    is_last = nextitem is None or card_of(nextitem.nodeid) != name
    said = "the card says nothing of this test"
    try:
        for data in card.run(item.nodeid, None if is_last else nextitem.nodeid):
            said = ""
            yield config.hook.pytest_report_from_serializable(config=config, data=data)
    except EOFError as error:
        del _cards[name]
        said = f"the process on the card ended: {error} {card.close()}"
        if not card.has_reported:
            _broken[name] = said
        yield from failed(item, said)
        return
    said += _cards.pop(name).close() if is_last else ""
    if said:
        yield from failed(item, said)


def failed(item: pytest.Item, why: str) -> Iterator[pytest.TestReport]:
    for when, outcome in (("call", "failed"), ("teardown", "passed")):
        of_item = item.nodeid, item.location, dict.fromkeys(item.keywords, 1)
        yield pytest.TestReport(*of_item, outcome, why if outcome == "failed" else None, when)


def pytest_sessionfinish():
    """After ``-x`` some cards may still be there."""
    while _cards:
        _cards.popitem()[1].close()
