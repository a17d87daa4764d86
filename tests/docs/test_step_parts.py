"""The picture of a step's time shows the numbers of the table beside it."""

import xml.etree.ElementTree as ElementTree

import pytest

from tests.docs import step_parts

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_drawn_from_the_table():
    """Drawn anew by ``python -m tests.docs.step_parts``."""
    page = step_parts.PAGE.read_text()
    assert f"(../pictures/{step_parts.PICTURE.name})" in page
    assert step_parts.PICTURE.read_text() == step_parts.draw(page)


def test_a_bar_is_as_long_as_its_part():
    page = step_parts.PAGE.read_text()
    rows = step_parts.bars(page)
    assert len(rows) % 2 == 0
    rectangles = ElementTree.fromstring(step_parts.draw(page)).iter(SVG + "rect")
    widths = [float(each.get("width")) for each in rectangles if each.get("height") == "22"]
    assert len(widths) == 4 * len(rows)
    for number, (_, parts) in enumerate(rows):
        drawn = widths[4 * number : 4 * number + 4]
        for part, width in zip(parts, drawn, strict=True):
            assert width / sum(drawn) == pytest.approx(part / sum(parts), abs=0.002)
