"""Seams between the plugin and vLLM: the pinned one has them all, and what is missing is named."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.compat import bodies, changes, others
from tests.compat.requirements import unmet
from tests.compat.seams import PLUGIN, Seam, Uses, installed
from tests.compat.source import Sources, modules
from tests.compat.types import Types
from vllm_npu_prep.compat.releases import installed_vllm, is_since

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def uses():
    return Uses.of_environment()


INSTALLED = installed_vllm()


def test_the_installed_vllm_has_every_seam_of_its_snapshot(uses):
    snapshot, _ = others.of_installed(INSTALLED)
    assert [str(each) for each in changes.changes(snapshot, uses)] == []


def test_the_snapshot_holds_what_the_code_uses(uses):
    snapshot, _ = others.of_installed(INSTALLED)
    assert changes.stale(snapshot, uses) == [], "run: make seams"


@pytest.mark.parametrize("version", others.OTHERS)
def test_each_difference_of_another_release_has_an_answer(version):
    release = others.Release.read(others.file_of(version))
    assert release.looked_up == others.digest_of(changes.read()), "run: make seams"
    unanswered = [each.name for each in release.differences if not each.answer]
    assert unanswered == [], f"write what answers these in {others.file_of(version).name}"


def test_differences_of_another_release_keep_their_answers(tmp_path, monkeypatch):
    """A list that is written again keeps what was answered, and what only that release has."""
    source = package(tmp_path / "vllm", {"__init__.py": "", "kernels.py": "def gather(x): ..."})
    body = bodies.Body("vllm.kernels", "gather", "a", "0")
    monkeypatch.setattr(bodies, "read", lambda: [body])
    gather, scatter = (Seam("vllm.kernels", name) for name in ("gather", "scatter"))
    snapshot = {gather: ": (x, y)", scatter: ": (x)"}
    release = others.compared(source, snapshot)
    digest = bodies.digest_of(body, folder=source)
    assert [(each.kind, each.name, each.now) for each in release.differences] == [
        ("gone", "vllm.kernels.scatter", ""),
        ("changed", "vllm.kernels.gather", ": (x)"),
        ("rewritten", "vllm.kernels:gather", digest),
    ]
    assert others.snapshot_with(snapshot, release) == {gather: ": (x)"}
    assert [each.digest for each in others.bodies_with(release)] == [digest]
    path = tmp_path / "vllm-9.json"
    only_there = others.Difference("new", "vllm.kernels.reduce", ": (x)", "used there")
    known = [replace(each, answer="known") for each in release.differences]
    path.write_text(json.dumps(asdict(others.Release("0", [*known, only_there]))))
    others.compared(source, snapshot).write(path)
    assert others.Release.read(path).differences == [*known, only_there]
    (source / "kernels.py").write_text("def gather(x, z): ...")
    others.compared(source, snapshot).write(path)
    answers = {each.kind: each.answer for each in others.Release.read(path).differences}
    assert answers == {"gone": "known", "changed": "", "rewritten": "", "new": "used there"}
    assert others.compared(source, {gather: ""}).looked_up != release.looked_up


def test_functions_whose_rules_are_repeated_did_not_change():
    _, functions = others.of_installed(INSTALLED)
    assert bodies.changed(functions) == []


SCHEDULER = "vllm.v1.core.sched.scheduler"


@pytest.mark.parametrize(
    ("module", "old", "new", "expected"),
    [
        (
            SCHEDULER,
            "if num_new_tokens == 0:",
            "if num_new_tokens <= 1:",
            ("rewritten", "Scheduler.schedule;", "scheduling/running.py", "tests.scheduling"),
        ),
        (
            SCHEDULER,
            "def _preempt_request(",
            "def _evict(",
            ("gone", "Scheduler._preempt_request;", "forget_blocks", "tests.scheduling"),
        ),
        (
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils",
            "tl.log(u)",
            "tl.log2(u)",
            ("rewritten", "_rejection_kernel;", "verify_drawn", "pytest tests/ops tests/v2 "),
        ),
    ],
)
def test_a_rewritten_function_is_named_with_what_to_look_at(module, old, new, expected):
    text = bodies.text_of(module)
    assert text is not None and old in text
    _, functions = others.of_installed(INSTALLED)
    (line,) = bodies.changed(functions, {module: text.replace(old, new)})
    assert [each for each in expected if each not in line] == []


NO_KERNEL = {
    "buffer_utils:_load_ptr": "reads an address",
    "model_states.recoverssm:": "of layers with states that are refused",
    "sample.batch_shard:": "sampling shared by ranks is refused",
    "sample.output:": "sampling masks are refused",
    "sample.trace_replay:": "refused",
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
    watched = {f"{each.module}:{each.name}" for each in bodies.read()}
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


def test_comments_of_upstream_s_functions_may_change():
    text = bodies.text_of(SCHEDULER)
    assert text is not None
    text = text.replace("# First, schedule the RUNNING requests.", "# In order.", 1)
    text = text.replace("Preempt a request and put it back", "Take a request's blocks, put it", 1)
    _, functions = others.of_installed(INSTALLED)
    assert bodies.changed(functions, {SCHEDULER: text}) == []


DOWNSTREAM = {
    "compat.py": """
        import sys
        import torch
        from vllm import Config
        from vllm.engine import Engine

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

        def started(engine: Engine) -> bool:
            return engine.config.size > 1 and hasattr(engine, "clock")
    """,
    "runner.py": """
        from typing import TYPE_CHECKING
        from vllm.engine import Engine

        if TYPE_CHECKING:
            from vllm.config import Config

        class Runner(Engine):
            kind = "npu"

            def __init__(self, config: "Config"):
                super().__init__(config)
                self.clock = self.own = 0

            def step(self, *args):
                for request in self.requests:
                    request.left
                self.own_too()
                return [each.name for each in self.batch.rows()]

            def own_too(self):
                from vllm.config import Config
                return Config(size=2)
    """,
}
UPSTREAM = {
    "__init__.py": "from .config import *",
    "server.py": "async def serve(app, port=80): ...",
    "kernels.py": "def gather(): ...\ndef scatter(x): ...\ndef spare(): ...",
    "config.py": """
        from dataclasses import dataclass

        @dataclass
        class Config:
            size: int
            unused: int = 0
    """,
    "batch.py": """
        class Row:
            name: str
            unused: str

        class Wide(Row):
            left: int

        class Batch:
            def rows(self) -> list[Row]: ...
    """,
    "base.py": """
        from .batch import Batch, Row

        class Base:
            kind: str

            def __init__(self, config):
                self.batch = Batch()
                self.requests: dict[int, Row] | list[Row] = []
                self.clock, self.unused = 0, 0

            def unused_too(self): ...
    """,
    "engine.py": """
        from vllm.base import Base
        from vllm.config import Config

        class Engine(Base):
            @property
            def config(self) -> Config: ...

            def step(self, *, budget: int = 7) -> None: ...
    """,
}
SEAMS = {
    "vllm.Config": ": class",
    "torch.accelerator.synchronize": ": (device=None)",
    "vllm.batch.Batch.rows": ": (self) -> list[Row]",
    "vllm.batch.Row.name": ": str",
    "vllm.batch.Wide.left": ": int",
    "vllm.config.Config": ": class",
    "vllm.config.Config.size": ": int",
    "vllm.engine.Engine": ": class",
    "vllm.engine.Engine.__init__": ": (self, config)",
    "vllm.engine.Engine.batch": " = Batch(...)",
    "vllm.engine.Engine.clock": "",
    "vllm.engine.Engine.config": ": property -> Config",
    "vllm.engine.Engine.kind": ": str",
    "vllm.engine.Engine.requests": ": dict[int, Row] | list[Row]",
    "vllm.engine.Engine.step": ": (self, *, budget=7) -> None",
    "vllm.kernels": ": module",
    "vllm.kernels.gather": ": ()",
    "vllm.kernels.scatter": ": (x)",
    "vllm.server": ": module",
    "vllm.server.serve": ": async (app, port=80)",
}


def package(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        indent = len(text) - len(text.lstrip(" \n")) - 1 if text.startswith("\n") else 0
        lines = [line[indent:] for line in text.splitlines()]
        (folder / name).write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What mypy knows of Python itself."""
    return tmp_path_factory.mktemp("mypy")


@pytest.fixture
def small(tmp_path, cache):
    """A small plugin and what it rests on."""
    torch = package(tmp_path / "torch", {"__init__.py": ""})
    accelerator = {"__init__.py": "def synchronize(device=None): ..."}
    package(torch / "accelerator", accelerator)
    folders = {
        "vllm": package(tmp_path / "vllm", UPSTREAM),
        "torch": torch,
        PLUGIN: package(tmp_path / PLUGIN, {"__init__.py": "", **DOWNSTREAM}),
    }

    def uses(typed: bool = True) -> Uses:
        types = Types(PLUGIN, folders[PLUGIN], cache, [tmp_path]) if typed else NO_TYPES
        return Uses(Sources(folders), types)

    return uses


NO_TYPES = SimpleNamespace(owners=lambda *_: (), constructed=lambda *_: None)
"""For what is found without mypy, which takes a second each time."""


def test_what_counts_as_a_seam(small):
    snapshot = changes.snapshot_of(small())
    assert {str(seam): signature for seam, signature in snapshot.items()} == SEAMS


def test_a_snapshot_is_read_as_it_was_written(small, tmp_path):
    snapshot = changes.snapshot_of(small())
    changes.write(snapshot, "1.2.3", tmp_path / "seams.txt")
    assert changes.read(tmp_path / "seams.txt") == snapshot
    assert changes.version_of(tmp_path / "seams.txt") == "1.2.3"


def test_new_and_unused_seams_are_named(small, tmp_path):
    snapshot = changes.snapshot_of(small())
    runner = tmp_path / "vllm_npu_prep" / "runner.py"
    text = runner.read_text()
    runner.write_text(text.replace("each.name", "each.unused").replace('kind = "npu"', "pass"))
    assert changes.stale(snapshot, small()) == [
        "new      vllm.batch.Row.unused  in runner.py",
        "unused   vllm.batch.Row.name",
        "unused   vllm.engine.Engine.kind",
    ]


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ('package = "vllm"', "package = kernels.package", "?.kernels.scatter"),
        ("    package =", '    prefix = "vllm"; package =', "?.scatter"),
        ("{prefix}.scatter", "{prefix}.gone", "vllm.kernels.gone"),
        ("{prefix}.gather", "vllm.{prefix}.gather", "vllm.vllm.kernels.gather"),
        ("{prefix}.gather", "vllm.{sys.platform}.gather", "vllm.?.gather"),
        ("from vllm import Config", "from vllm import Configs", "vllm.Configs"),
    ],
)
def test_a_full_name_that_names_nothing_is_an_error(small, tmp_path, old, new, name):
    path = tmp_path / "vllm_npu_prep" / "compat.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    uses = small(typed=False)
    assert changes.unknown({}, uses) == [f"unknown  {name}  in compat.py"]
    assert set(changes.unknown({}, uses)) < set(changes.stale({}, uses))
    assert changes.unknown({Seam(*name.rsplit(".", 1)): ""}, uses) == []


def test_a_moved_class_is_followed_unless_it_is_imported(small, tmp_path):
    snapshot = changes.snapshot_of(small())
    upstream = tmp_path / "vllm"
    (upstream / "batch.py").rename(upstream / "rows.py")
    base, engine = upstream / "base.py", upstream / "engine.py"
    base.write_text(base.read_text().replace(".batch import", ".rows import"))
    assert changes.changes(snapshot, small()) == []
    (upstream / "engine.py").rename(upstream / "core.py")
    assert [str(each) for each in changes.changes(snapshot, small())] == [
        "gone     vllm.engine.Engine\n"
        "         now vllm.core.Engine\n"
        "         in  compat.py, runner.py"
    ]
    assert not engine.exists()


def test_gone_and_changed_seams_are_named_with_their_files(small, tmp_path):
    snapshot = changes.snapshot_of(small())
    edits = {
        "batch.py": ("class Wide(Row)", "class Broad(Row)"),
        "engine.py": ("budget: int = 7", "budget: int = 8"),
        "kernels.py": ("def scatter(x)", "def spread(x)"),
        "server.py": ("async def serve", "async def serve_all(): ...\nasync def _serve"),
        "config.py": ("@dataclass", "def scatter(x): ...\n\n@dataclass"),
    }
    for name, (old, new) in edits.items():
        path = tmp_path / "vllm" / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    lines = [" ".join(str(each).split()) for each in changes.changes(snapshot, small())]
    assert lines == [
        "gone vllm.batch.Wide with left in runner.py",
        "gone vllm.kernels.scatter now vllm.config.scatter in compat.py",
        "gone vllm.server.serve in compat.py",
        "changed vllm.engine.Engine.step was (self, *, budget=7) is (self, *, budget=8) "
        "in runner.py",
    ]


def test_requirements_that_are_not_met_are_named(monkeypatch):
    # vLLM 0.33.0 asks for a certifi that is newer than any that index and pins agree on
    assert {each.partition(">")[0] for each in unmet()} <= (
        set() if INSTALLED == others.PINNED else {"certifi"}
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
