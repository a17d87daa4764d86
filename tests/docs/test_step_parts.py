"""The picture of a step's time shows the numbers of the table beside it."""

from tests.docs import step_parts


def test_the_picture_is_drawn_from_the_table():
    """Drawn anew by ``python -m tests.docs.step_parts``."""
    page = step_parts.PAGE.read_text()
    assert len(step_parts.bars(page)) > 0
    assert f"(../pictures/{step_parts.PICTURE.name})" in page
    assert step_parts.PICTURE.read_text() == step_parts.draw(page)
