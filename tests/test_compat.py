"""Seams between the plugin and vLLM: the pinned one has them all, and what is missing is named."""

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.compat import lists
from tests.compat.lists import Answers, differences, digest_of, told
from tests.compat.requirements import unmet
from tests.compat.seams import PLUGIN, Uses, installed
from tests.compat.source import Sources, modules
from vllm_npu_prep.compat.releases import installed_vllm, is_since

ROOT = Path(__file__).parents[1]
INSTALLED = installed_vllm()


def test_the_installed_vllm_has_all_that_the_code_uses():
    """The lists hold just what the text uses, and each name and function is as they say."""
    uses, known = Uses.of_environment(), lists.of_release(INSTALLED)
    assert lists.stale(known, uses) == [], "run: make seams"
    plugin = uses.sources.packages[PLUGIN]
    found = [told(each, known[each.name], plugin) for each in differences(known, uses.sources)]
    assert found == []


@pytest.mark.parametrize("version", lists.OTHERS)
def test_each_difference_of_another_release_has_an_answer(version):
    answers = Answers.read(lists.file_of(version))
    assert answers.looked_up == lists.digest_of_lists(), "run: make seams"
    unanswered = [each.name for each in answers.differences if not each.answer]
    assert unanswered == [], f"write what answers these in {lists.file_of(version).name}"


NO_KERNEL = {
    "buffer_utils:_load_ptr": "reads an address",
    "model_states.recoverssm:": "of layers with states that are refused",
    "sample.batch_shard:": "sampling shared by ranks is refused",
    "sample.watermark:": "refused",
    "spec_decode.acceptance_estimator:": "adaptive verification is refused",
    "spec_decode.(dflash|dflash2|xpress).": "methods that are refused",
    "spec_decode.multi_module_mtp.": "the first MTP layer makes all passes here",
    "spec_decode.rejection_sampler_utils:.*(residual_mass|cumulative|is_bonus)": (
        "block verification is refused, and only rows of drafts are verified"
    ),
}
"""Kernels of upstream's V2 runner for which nothing stands here, and why: beginnings of names."""
if is_since("0.33.0"):
    NO_KERNEL["sample.gumbel:spec_step_seed"] = "other numbers by a seed"


def test_kernels_of_v2_that_are_replaced_are_watched():
    watched = lists.read_bodies()
    folder = installed()["vllm"] / "v1/worker/gpu"
    kernels = [
        f"{module.removeprefix('vllm.v1.worker.gpu.')}:{node.name}"
        for module, path in modules("vllm.v1.worker.gpu", folder)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    ]
    assert len(kernels) > 80
    left = [each for each in kernels if f"vllm.v1.worker.gpu.{each}" not in watched]
    of_each = {name: [each for each in NO_KERNEL if re.match(each, name)] for name in left}
    unexplained = [name for name, reasons in of_each.items() if not reasons]
    assert unexplained == [], (
        "list these in bodies.txt, or say in NO_KERNEL why nothing stands here"
    )
    assert set(NO_KERNEL) == set().union(*of_each.values()), "a line of NO_KERNEL is stale"


PATCHES = """
import sys
import torch
from vllm import Config

def patch():
    entry = sys.modules.get("vllm.server")
    entry.serve = None
    torch.accelerator.synchronize = None
    prefix = "vllm.kernels"
    return {f"{prefix}.gather": None}

def patch_others(kernels):
    package = "vllm"
    prefix = f"{package}.kernels"
    kernels.override_triton_kernels({f"{prefix}.scatter": None})
"""
UPSTREAM = {
    "__init__.py": "from .config import *",
    "config.py": "class Config:\n    size: int\n    def copy(self, *, deep=True): ...\n",
    "server.py": "async def serve(app, port=80): ...",
    "kernels.py": "def gather(): ...\ndef scatter(x): ...\ndef spare(): ...",
}
SEAMS = {
    "torch.accelerator.synchronize": ": (device=None)",
    "vllm.Config": ": class",
    "vllm.kernels": ": module",
    "vllm.kernels.gather": ": ()",
    "vllm.kernels.scatter": ": (x)",
    "vllm.server": ": module",
    "vllm.server.serve": ": async (app, port=80)",
}
NO_TYPES = SimpleNamespace(owners=lambda *_: (), constructed=lambda *_: None)
"""For what is found without mypy, which takes a minute: the list of the installed vLLM has that."""


def package(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def small(tmp_path):
    """What a small plugin uses of packages that it rests on."""
    accelerator = {"__init__.py": "def synchronize(device=None): ..."}
    package(package(tmp_path / "torch", {"__init__.py": ""}) / "accelerator", accelerator)
    package(tmp_path / "vllm", UPSTREAM)
    package(tmp_path / PLUGIN, {"__init__.py": "", "compat.py": PATCHES})
    return lambda: Uses(Sources({n: tmp_path / n for n in ("vllm", "torch", PLUGIN)}), NO_TYPES)


def test_names_in_imports_strings_and_patches_are_seams(small):
    assert small().signatures == SEAMS


def change(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))


def test_gone_and_changed_names_are_told_with_their_files(small, tmp_path):
    """A class that is gone is told once, for all its members."""
    members = {f"vllm.config.Config.{name}": "" for name in ("size", "copy")}
    change(tmp_path / "vllm", "config.py", "class Config", "class Configs")
    change(tmp_path / "vllm", "server.py", "port=80", "port=81")
    found = differences(SEAMS | members, small().sources)
    lines = [told(each, SEAMS.get(each.name, ""), tmp_path / PLUGIN) for each in found]
    assert [" ".join(line.split()) for line in lines] == [
        "gone vllm.Config in compat.py",
        "changed vllm.server.serve was port=80) is port=81) in compat.py",
        "gone vllm.config.Config in compat.py",
    ]


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("return x", "return x + 1", "rewritten"),
        ("def gather", "def collect", "gone"),
        ("# in order", "# at once", None),
        ("Rows", "Columns", None),
    ],
)
def test_rewritten_functions_are_told_but_not_their_comments(tmp_path, old, new, kind):
    text = 'def gather(x):\n    """Rows."""\n    # in order\n    return x\n'
    sources = Sources({"vllm": package(tmp_path / "vllm", {"__init__.py": text})})
    known = {"vllm:gather": digest_of(sources, "vllm:gather")}
    change(tmp_path / "vllm", "__init__.py", old, new)
    assert [each.kind for each in differences(known, sources)] == ([kind] if kind else [])


def test_requirements_that_are_not_met_are_named(monkeypatch):
    # vLLM 0.33.0 asks for a certifi that is newer than any that index and pins agree on
    assert {each.partition(">")[0] for each in unmet()} <= (
        set() if INSTALLED == lists.PINNED else {"certifi"}
    )
    asked = ["numpy>=999", "no-such-package>1", "torch>=2", 'pip>999; extra == "more"']
    monkeypatch.setattr(metadata, "requires", lambda package: asked)
    assert unmet() == {"numpy>=999": metadata.version("numpy"), "no-such-package>1": None}


def test_a_release_that_does_not_exist_is_one_line(tmp_path):
    source = tmp_path / "vllm-9.1.0"
    source.mkdir()
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.1.0\n")
    shutil.make_archive(str(source), "gztar", tmp_path, "vllm-9.1.0")
    run = subprocess.run(
        [ROOT / "scripts" / "compat.sh", "9.2.0", tmp_path / "environment"],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert line == "compat: the package index has no source of vLLM 9.2.0; available: 9.1.0"
    assert not (tmp_path / "environment").exists()
