"""Functions of vLLM whose rules the plugin repeats are what they were; other releases."""

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.compat import bodies
from tests.compat.bodies import BODIES, PINNED, digest_of, folder_of, modules
from tests.compat.requirements import unmet
from vllm_npu_prep.compat.releases import installed_vllm, is_since

ROOT = Path(__file__).parents[1]
INSTALLED = installed_vllm()


def test_functions_of_the_installed_vllm_are_as_their_list_says():
    assert bodies.rewritten(folder_of("vllm"), INSTALLED) == []


@pytest.mark.parametrize("version", bodies.OTHERS)
def test_each_difference_of_another_release_has_an_answer(version):
    path = bodies.list_of(version)
    assert path.read_text().startswith(bodies.looked_up()), "run: make seams"
    unanswered = [name for name, (_, answer) in bodies.read(path).items() if not answer]
    assert unanswered == [], f"write what answers these in {path.name}"


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
    watched = bodies.read(BODIES)
    folder = folder_of("vllm") / "v1/worker/gpu"
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


@pytest.mark.parametrize(
    ("old", "new", "is_known"),
    [
        ("return x", "return x + 1", False),
        ("def gather", "def collect", False),
        ("# in order", "# at once", True),
        ("Rows", "Columns", True),
    ],
)
def test_rewritten_functions_are_told_but_not_their_comments(tmp_path, old, new, is_known):
    text = 'def gather(x):\n    """Rows."""\n    # in order\n    return x\n'
    digests = []
    for written in (text, text.replace(old, new)):
        (tmp_path / "kernels.py").write_text(written)
        digests.append(digest_of(tmp_path, "vllm.kernels:gather"))
    assert (digests[0] == digests[1]) is is_known


def test_requirements_that_are_not_met_are_named(monkeypatch):
    # vLLM 0.33.0 asks for a certifi that is newer than any that index and pins agree on
    assert {each.partition(">")[0] for each in unmet()} <= (
        set() if INSTALLED == PINNED else {"certifi"}
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
