"""What pages show and say of steps is what `explain` shows and says of them."""

import io
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.docs import figures

PAGES = figures.pages()
WORKED = [page for page in PAGES if "<!-- end -->" in page.read_text()]
TRANSLATED = [page for page in PAGES if page.with_suffix(".zh.md").exists()]


MEASURED = {"long-context.png"}
"""Drawn by a benchmark, of what it measured."""


def names(pages: list[Path]) -> list[str]:
    return [page.name for page in pages]


def test_the_first_pages_have_a_picture_and_the_readme_a_step():
    assert "how-a-step-is-prepared.md" in names(TRANSLATED)
    first = [page for page in PAGES if page.name in ("README.md", "index.md")]
    assert [len(figures.pictures(page)) for page in first] == [1, 1]
    assert "README.md" in names(WORKED)


@pytest.mark.parametrize("page", WORKED, ids=names(WORKED))
def test_regions_are_what_explain_prints(page):
    """Written anew by ``python -m tests.docs.figures``; look at what changes."""
    text = page.read_text()
    assert len(figures.REGION.findall(text)) == text.count("<!-- end -->") > 0
    assert figures.written(text) == text


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_pictures_are_what_explain_draws(page):
    drawn = figures.pictures(page)
    shown = {page.parent / match["path"] for match in figures.PICTURE.finditer(page.read_text())}
    assert {path for path in shown if path.name not in MEASURED} == set(drawn)
    for path, picture in drawn.items():
        assert np.array_equal(pixels(path.read_bytes()), pixels(picture)), path.name
        assert len(picture) < 64 << 10, path.name


def pixels(picture: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(picture)))


@pytest.mark.parametrize("page", WORKED, ids=names(WORKED))
def test_what_the_prose_says_holds_for_the_step_above(page):
    text = page.read_text()
    broken = [line for line in without_blocks(text).splitlines() if line.count("`") % 2]
    assert not broken  # over two lines: would not be found
    found = list(figures.formulas(text))
    assert found
    for formula, file in found:
        first, *others = figures.values(formula, file)
        assert others, formula
        for other in others:
            assert np.array_equal(np.asarray(first), np.asarray(other)), formula


PARTS = {
    "heading": lambda text: re.findall(r"^#+ ", text),
    "blocks": lambda text: re.findall(BLOCK, text),
    "explained": lambda text: [match[0] for match in figures.MARKER.finditer(text)],
    "pictures": lambda text: [match["path"] for match in figures.PICTURE.finditer(text)],
    "formulas": lambda text: list(figures.formulas(text)),
    "code": lambda text: Counter(re.findall(r"`([^`\n]+)`", without_blocks(text))),
    "numbers": lambda text: Counter(re.findall(r"\d+", LINKED.sub("", without_blocks(text)))),
    "links": lambda text: {link.replace(".zh.md", ".md") for link in LINKED.findall(text)},
    "columns": lambda text: [
        line.count("|") for line in without_blocks(text).splitlines() if line[:1] == "|"
    ],
}
"""What a section has in each language, word order apart."""


@pytest.mark.parametrize("page", TRANSLATED, ids=names(TRANSLATED))
def test_a_translation_says_the_same_section_by_section(page):
    text, other = (sections(each.read_text()) for each in (page, page.with_suffix(".zh.md")))
    assert len(text) == len(other) > 10
    for section, translated in zip(text, other):
        heading = section.partition("\n")[0]
        for part, of_section in PARTS.items():
            assert of_section(section) == of_section(translated), f"{heading}: {part}"
        assert re.search(r"[\u4e00-\u9fff]{4}", translated), heading


BLOCK = r"(?ms)^```.*?^```"
LINKED = re.compile(r"(?<=\]\()[^)\s]+")


def sections(text: str) -> list[str]:
    """A page, cut before each heading."""
    places = [match.start() for match in re.finditer(r"^#+ ", text, re.MULTILINE)]
    inside = [match.span() for match in re.finditer(BLOCK, text)]
    places = [at for at in places if not any(a < at < b for a, b in inside)]
    return [text[a:b] for a, b in zip(places, [*places[1:], len(text)])]


def without_blocks(text: str) -> str:
    return re.sub(BLOCK, "", text)
