"""READMEs and the pages of docs/, read as CommonMark: code blocks, links, tables, code spans."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->", re.DOTALL)
"""Before a code block: why it isn't run here."""

RUN_WITH = re.compile(r"<!-- run with: (?P<command>.+?) -->")
"""Before Python code: the command that runs Python here."""


@dataclass(frozen=True)
class CodeBlock:
    page: Path
    line: int  # of its fence, from 1
    language: str  # empty if the fence names none
    text: str
    not_run: str | None  # why
    run_with: str  # before the interpreter's name

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Table:
    """A table of a page."""

    heading: str  # that it stands under
    rows: list[list[str]]  # cells, the head first


class Page:
    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path.relative_to(ROOT))
        self.text = path.read_text()
        self.tokens = MarkdownIt("commonmark").enable("table").parse(self.text)
        self.pairs = list(zip([None, *self.tokens], self.tokens))  # each with the one before it
        self.inline = [child for token in self.tokens for child in token.children or ()]

    @cached_property
    def blocks(self) -> list[CodeBlock]:
        """Fenced blocks, in lists too."""
        found = []
        for before, token in self.pairs:
            if token.type == "fence":
                comment = before.content if _is_comment(before) else ""
                not_run, run_with = NOT_RUN.match(comment), RUN_WITH.match(comment)
                found.append(
                    CodeBlock(
                        self.path,
                        token.map[0] + 1,
                        token.info.strip(),
                        token.content,
                        not_run["reason"] if not_run else None,
                        run_with["command"] if run_with else "",
                    )
                )
        return found

    @cached_property
    def markers(self) -> int:
        """Comments that mark a block, or were meant to."""
        return sum(
            _is_comment(token) and re.search(r"\brun\b", token.content) is not None
            for token in self.tokens
        )

    @cached_property
    def links(self) -> list[str]:
        """Targets of links and pictures."""
        targets = [token.attrGet("href") or token.attrGet("src") for token in self.inline]
        return [target for target in targets if target]

    @cached_property
    def code(self) -> list[str]:
        return [token.content for token in self.inline if token.type == "code_inline"]

    @cached_property
    def tables(self) -> list["Table"]:
        """Tables, with cells as they are written."""
        tables: list[Table] = []
        heading = ""
        for before, token in self.pairs:
            if token.type == "inline" and before.type == "heading_open":
                heading = token.content
            elif token.type == "table_open":
                tables.append(Table(heading, []))
            elif token.type == "tr_open":
                tables[-1].rows.append([])
            elif token.type == "inline" and before.type in ("td_open", "th_open"):
                tables[-1].rows[-1].append(token.content)
        return tables

    @property
    def rows(self) -> list[list[str]]:
        """Rows of all tables, without their heads."""
        return [row for table in self.tables for row in table.rows[1:]]

    @cached_property
    def anchors(self) -> set[str]:
        """What links to its headings say behind ``#``."""
        return {
            _slug(token.content)
            for before, token in self.pairs
            if token.type == "inline" and before.type == "heading_open"
        }


def code_of(text: str) -> list[str]:
    """Code spans of a line."""
    (inline,) = MarkdownIt("commonmark").parseInline(text)
    return [child.content for child in inline.children or () if child.type == "code_inline"]


def _is_comment(token: Token | None) -> bool:
    return token is not None and token.type == "html_block"


def _slug(heading: str) -> str:
    plain = re.sub(r"[^\w\s-]", "", heading).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


READMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "emulator/README.md")
PAGES = {
    str(path.relative_to(ROOT)): Page(path)
    for path in [*map(ROOT.joinpath, READMES), *sorted((ROOT / "docs").rglob("*.md"))]
}
"""Every page by its name."""
