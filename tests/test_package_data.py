"""What is installed beside the code: every file that the package reads at run time."""

import ast
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]


def declared() -> dict[str, list[str]]:
    """``package_data`` of setup.py."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.keyword) and node.arg == "package_data":
            return ast.literal_eval(node.value)
    raise AssertionError("setup.py declares no package_data")


def test_files_beside_the_code_are_installed_with_it():
    data = declared()
    for package, patterns in data.items():
        folder = ROOT / package.replace(".", "/")
        for pattern in patterns:
            assert list(folder.glob(pattern)), f"{package}: {pattern} matches nothing"
    templates = [
        path for name in ("page.*", "run.*") for path in (ROOT / "vllm_npu_prep").rglob(name)
    ]
    read = {(path.stem, path.suffix) for path in templates}
    assert read >= {(stem, end) for stem in ("page", "run") for end in (".css", ".html", ".js")}
    for path in templates:
        if path.suffix not in (".py", ".pyc"):
            package = ".".join(path.parent.relative_to(ROOT).parts)
            assert any(fnmatch(path.name, pattern) for pattern in data[package]), path.name
