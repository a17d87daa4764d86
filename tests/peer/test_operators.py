"""Operators that vllm-ascend's sources call have a reference, or the page says who reaches them."""

import ast
from collections.abc import Iterator
from pathlib import Path

from ascend_emulator.operators import OLD_NAMES, REFERENCES, custom
from tests.helpers.emulator import ROOT
from tests.peer.test_peer import ENVIRONMENT, pytestmark  # noqa: F401 - it has to be there

PACKAGE = ENVIRONMENT / "lib" / "python3.11" / "site-packages" / "vllm_ascend"
PAGE = ROOT / "docs" / "changing" / "vllm-ascend-without-a-card.md"
OTHER_CARDS = "_310p"
"""Folder of the Atlas 300I's code."""
GENERATED = "_cann_ops_custom"
NAMESPACES = ("torch.ops.npu", "torch.ops.atb", "torch.ops._C_ascend")
MODULES = ("torch_npu", "torch_npu.atb")


def called_in(path: Path) -> Iterator[str]:
    """Operators that a file names, outside of comments and assignments."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Store):
            continue
        owner = ast.unparse(node.value)
        if owner in NAMESPACES or (owner in MODULES and "npu_" in node.attr[:5]):
            yield node.attr


def test_operators_without_a_reference_are_on_the_page():
    files = [
        path
        for path in PACKAGE.rglob("*.py")
        if not {OTHER_CARDS, GENERATED} & {*path.relative_to(PACKAGE).parts}
    ]
    called = {name for path in files for name in called_in(path)}
    names = [*(each.name for each in (*REFERENCES, *OLD_NAMES)), *custom.REFERENCES]
    known = {name.split("::")[1] for name in names}
    assert len(called & known) > 30
    page = PAGE.read_text()
    assert sorted(name for name in called - known if f"`{name}`" not in page) == []
