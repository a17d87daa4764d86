"""`make mutants RANDOM=50`: what it changes, what runs for a change, and what comes of it."""

import ast

from tests.mutants import __main__ as command
from tests.mutants.sites import PACKAGE, draw, every_site, sites_of

SOURCE = b'''"""Numbers in texts, annotations and errors stay: 7."""
LIMIT: "int | 1" = 3


def place(row: int, width: "3 + 4", *, first: int = 0) -> int:
    """Row 5."""
    if not row and (  # and so on
        first
    ) < width:
        raise ValueError(f"{row + 8} of {width}")
    total = 2 * row
    total += max(row, width)
    return where(row, total.real) if row is not None else True
'''
CHANGES = {
    'LIMIT: "int | 1" = 3': {'LIMIT: "int | 1" = 4', 'LIMIT: "int | 1" = 2'},
    'def place(row: int, width: "3 + 4", *, first: int = 0) -> int:': {
        'def place(row: int, width: "3 + 4", *, first: int = 1) -> int:'
    },
    "if not row and ( # and so on": {"if not row or ( # and so on", "if row and ( # and so on"},
    ") < width:": {") <= width:"},
    "total = 2 * row": {"total = 3 * row", "total = 1 * row"},
    "total += max(row, width)": {"total -= max(row, width)", "total += min(row, width)"},
    "return where(row, total.real) if row is not None else True": {
        "return where(total.real, row) if row is not None else True",
        "return where(row, total.real) if row is None else True",
        "return where(row, total.real) if row is not None else False",
    },
}


def test_operators_and_constants_are_changed_and_texts_are_not():
    sites = sites_of("prep/file.py", SOURCE)
    found = {site.before: {s.after for s in sites if s.before == site.before} for site in sites}
    assert found == CHANGES
    assert {site.function for site in sites} == {"", "place"}


def test_changes_of_the_package_can_be_planted():
    for site in draw(seed=1, count=50):
        before, after = site.planted()
        source = (PACKAGE / site.path).read_text()
        assert source.count(before) == 1, site.key
        changed = source.replace(before, after)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), site.key


def test_keys_are_distinct_and_equivalent_ones_are_there():
    """A line of equivalent.txt whose code moved on has to be looked at again."""
    keys = [site.key for site in every_site()]
    assert len(set(keys)) == len(keys) > 4000
    assert set(command.equivalent()) - set(keys) == set()
