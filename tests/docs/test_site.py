"""The site builds without a warning, asks no other host for anything, and is searched offline."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, READMES, ROOT
from tests.helpers.browser import needs_browser, opened
from tests.matrix.results import Matrix

ELSEWHERE = re.compile(r"\s*(https?:)?//", re.IGNORECASE)


class Fetches(HTMLParser):
    """What a page makes a browser load, what it links to, and the classes that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.linked: set[str] = set()
        self.classes: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.classes |= set(values.get("class", "").split())
        if tag == "a":
            self.linked.add(values.get("href", ""))
        elif values.get("rel") != "canonical":
            fetched = ("src", "srcset", "data", "href")
            self.targets += [values[name] for name in fetched if name in values]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of the built site, as ``make docs`` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there_and_no_other_host_is_asked(site):
    pages = {Path(name).relative_to("docs") for name in PAGES if name.startswith("docs/")}
    for page in pages:
        html = Fetches(site / page.with_suffix(".html"))
        assert html.targets, page
        elsewhere = [target for target in html.targets if ELSEWHERE.match(target)]
        assert not elsewhere, page
        assert "mermaid" not in html.classes, f"{page}: mermaid is loaded from another host"
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text()), style


def test_the_site_has_the_whole_matrix_and_the_operators(site):
    matrix = (site / "reference" / "matrix.html").read_text()
    models = {model for of_table in Matrix.read().tables().values() for model in of_table}
    assert models and [model for model in models if model not in matrix] == []
    assert 'id="why-not"' in matrix
    page = Fetches(site / "start" / "ascend.html")
    assert "../changing/operators.html#what-to-try-first-on-hardware" in page.linked
    assert 'id="what-to-try-first-on-hardware"' in (site / "changing/operators.html").read_text()


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_searches_it_as_files_and_asks_nobody(site, network, dark):
    document, _ = opened(
        site / "index.html", network, "?q=slot_mapping", "--virtual-time-budget=20000", dark=dark
    )
    assert network[1] == []
    assert re.search(r"[1-9]\d* matching documents", document)
    assert f'data-md-color-scheme="{"slate" if dark else "default"}"' in document


@pytest.mark.parametrize("name", READMES)
def test_a_readme_links_to_what_is_there(name):
    for target in PAGES[name].links:
        path, _, anchor = target.partition("#")
        if not ELSEWHERE.match(target):
            linked = (ROOT / name).parent / path if path else ROOT / name
            assert linked.exists(), target
            page = str(linked.resolve().relative_to(ROOT))
            assert not anchor or anchor in PAGES[page].anchors, target
