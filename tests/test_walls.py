"""The walls of the layout: who may import what, who may patch, who holds arithmetic."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vllm_npu_prep"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TORCH_NPU_ALLOWED = (
    "device/npu.py",
    "attention/kernels/fia.py",
    "attention/kernels/atb.py",
    "ops/npu.py",
    "graph/",
    "emulator/",
)
EMULATOR = "vllm_npu_prep.emulator"
UPSTREAM_STATE = {"torch", "vllm", "sys"}


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported_modules(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def assigned_owners(tree: ast.AST, modules: set[str]) -> list[str]:
    """Attributes of imported modules that a file assigns to: patches."""
    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if root is not target and isinstance(root, ast.Name) and root.id in modules:
                found.append(ast.unparse(target))
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "setattr"
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id in modules
        ):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_pure_core_imports_neither_vllm_nor_torch_npu_nor_names_cuda(path):
    if not relative(path).startswith("prep/"):
        return
    assert not imported_modules(ast.parse(path.read_text())) & {"vllm", "torch", "torch_npu"}
    assert "cuda" not in path.read_text().lower()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_torch_npu_is_imported_behind_the_device_walls_only(path):
    if relative(path).startswith(TORCH_NPU_ALLOWED):
        return
    assert "torch_npu" not in imported_modules(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_the_plugin_is_unaware_of_the_emulator(path):
    if relative(path).startswith(("emulator/", "cli.py")):  # the command that offers it
        return
    text = path.read_text()
    assert EMULATOR not in text and "NPU_EMULATOR" not in text


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_only_compat_patches(path):
    if relative(path) == "compat.py":
        return
    tree = ast.parse(path.read_text())
    modules = imported_modules(tree) & UPSTREAM_STATE
    assert assigned_owners(tree, modules) == []


def test_the_patch_detector_sees_patches():
    tree = ast.parse("import torch\ntorch.cuda.Event = 1\nsetattr(torch, 'x', 2)\ntorch.a += 1")
    assert len(assigned_owners(tree, {"torch"})) == 3


def test_runner_holds_no_arithmetic():
    tree = ast.parse((PACKAGE / "model_runner.py").read_text())
    operations = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp | ast.AugAssign) and not isinstance(node.op, ast.BitOr)
    ]
    # The one exception says how many tokens a step samples: drafts and the token behind them.
    assert operations == ["int(num_draft_tokens.max()) + 1"]


def test_prepare_inputs_shows_its_six_steps_in_order_on_one_screen():
    source = (PACKAGE / "model_runner.py").read_text()
    tree = ast.parse(source)
    method = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "_prepare_inputs"
    )
    assert method.end_lineno - method.lineno < 50
    text = ast.get_source_segment(source, method)
    steps = re.findall(r"\b([1-6]) (padding|layout|kernel|state|copy|metadata)", text)
    assert steps == [
        ("1", "padding"),
        ("2", "layout"),
        ("3", "kernel"),
        ("4", "state"),
        ("5", "copy"),
        ("6", "metadata"),
    ]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_file_outgrows_its_job(path):
    assert len(path.read_text().splitlines()) <= 500
