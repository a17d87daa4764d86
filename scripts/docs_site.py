"""What the documentation's site has beside the pages of docs/: mkdocs calls these functions."""

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OPERATORS, IN_SITE = "../../emulator/operators.md", "../changing/operators.md"
"""The list of operators belongs to the emulator: how pages of docs/ link to it, and in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    content = (ROOT / "emulator" / "operators.md").read_text()
    files.append(File.generated(config, "changing/operators.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "reference/matrix.md":
        sys.path.insert(0, str(ROOT))
        from tests.matrix.page import whole
        from tests.matrix.results import Matrix

        markdown += "\n" + whole(Matrix.read())
    return markdown.replace(f"]({OPERATORS}", f"]({IN_SITE}")
