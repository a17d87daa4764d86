"""The walls of the layout: who may import what, who may patch, who holds arithmetic."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.imports import (
    Graph,
    When,
    circle,
    imported_by,
    imports,
    module_of,
    with_packages,
)

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_npu_prep"
TORCH_NPU_ALLOWED = (
    "device/npu.py",
    "device/npu_regions.py",
    "attention/kernels/fia.py",
    "attention/kernels/fused_delta.py",
    "attention/kernels/latent_fia.py",
    "attention/kernels/sparse_fia.py",
    "attention/kernels/atb.py",
    "graph/",
    "verify/calls/call_recorder.py",
    "verify/calls/call_rows.py",
    "verify/collectives.py",
    "verify/copies.py",
    "verify/calls/verified.py",
)
PATCHABLE = {"torch", "vllm", "sys"}


@cache
def parsed(folder: str) -> dict[str, ast.Module]:
    """Files in a folder by their paths in it, parsed."""
    root = ROOT / folder
    return {
        path.relative_to(root).as_posix(): ast.parse(path.read_text())
        for path in sorted(root.rglob("*.py"))
    }


def sources() -> dict[str, ast.Module]:
    return parsed("vllm_npu_prep")


def emulator() -> dict[str, ast.Module]:
    return parsed("emulator/ascend_emulator")


TESTS = {
    path.relative_to(ROOT / "tests").as_posix(): path.read_text()
    for path in sorted((ROOT / "tests").rglob("*.py"))
}


def imported_modules(tree: ast.AST) -> set[str]:
    """Modules that a file imports, dotted, at any place."""
    return {module for module, _, _ in imports(tree)}


def top_level(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(tree)}


def foreign_names(tree: ast.AST) -> set[str]:
    """Names that imports of torch, vllm and sys bind in a file."""
    return {
        alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else top)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        for top in [(getattr(node, "module", None) or alias.name).split(".")[0]]
        if top in PATCHABLE
    }


CHANGES = ("setattr", "delattr", "instead_of")
"""Functions that change what their first argument has."""


def is_changed(node: ast.AST) -> bool:
    """Whether a file assigns or deletes an attribute or an element here."""
    of_another = isinstance(node, ast.Attribute | ast.Subscript)
    return of_another and isinstance(node.ctx, ast.Store | ast.Del)


def patches(tree: ast.AST) -> list[str]:
    """Places where a file changes something that it imported from torch, vllm or sys."""
    foreign, found = foreign_names(tree), []
    for node in ast.walk(tree):
        root = node if is_changed(node) else None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CHANGES:
            root = node.args[0]
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if isinstance(root, ast.Name) and root.id in foreign:
            found.append(ast.unparse(node))
    return found


def test_pure_core_imports_itself_numpy_and_numba_only():
    # llvmlite is a part of numba, with which its intrinsics are written
    allowed = {"numpy", "numba", "llvmlite", "vllm_npu_prep", *sys.stdlib_module_names}
    core = {name: tree for name, tree in sources().items() if name.startswith("prep/")}
    assert {n: found for n, tree in core.items() if (found := top_level(tree) - allowed)} == {}


def test_torch_npu_is_imported_behind_the_device_walls_only():
    importers = {name for name, tree in sources().items() if "torch_npu" in top_level(tree)}
    assert {name for name in importers if not name.startswith(TORCH_NPU_ALLOWED)} == set()


def test_only_compat_and_the_watch_patch():
    """The watch replaces one method, by which it learns of each worker."""
    found = {name: places for name, tree in sources().items() if (places := patches(tree))}
    assert len(found.pop("watch/attach.py")) == 1
    assert {name: found[name] for name in found if not name.startswith("compat/")} == {}
    assert sum(map(len, found.values())) >= 15, "patches are not seen"


def test_the_plugin_neither_imports_nor_asks_for_the_emulator():
    importers = {n for n, tree in sources().items() if "ascend_emulator" in top_level(tree)}
    askers = {n for n in sources() if "emulat" in (PACKAGE / n).read_text().lower()}
    # The command `vllm-npu-prep emulate` starts the emulator's own.
    assert (importers, askers) == (set(), {"cli.py"})


def test_the_emulator_and_its_tests_know_nothing_of_the_plugin():
    allowed = {"ascend_emulator", "torch", "torch_npu", *sys.stdlib_module_names}
    outside = {n: found for n, tree in emulator().items() if (found := top_level(tree) - allowed)}
    assert outside == {"triton_kernels.py": {"triton", "numpy"}}  # whose interpreter computes so
    tests = parsed("tests/emulator").items()
    assert {n for n, tree in tests if {"vllm", "vllm_npu_prep"} & top_level(tree)} == set()


def names_of(tree: ast.AST) -> set[str]:
    """Names and attributes that a file uses, and those of its parameters."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return used | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


RUNNERS = re.compile(r"(model_runner|v[12]\.(runner|setup)|runner\.common)$")
"""Modules of runners, upstream's and ours."""
RECORDS = {"AsyncModelRunnerOutput", "BatchReqState", "ModelRunnerOutput"}
"""What upstream names after a runner, or has beside one, and what is none."""


def knows_a_runner(tree: ast.AST) -> set[str]:
    """How a part of the runner knows one: by import, or because it is handed one."""
    found = [(module, name) for module, name, _ in imports(tree) if name not in RECORDS]
    modules = {module for module, _ in found if RUNNERS.search(module)}
    return modules | {name for name in names_of(tree) - RECORDS if "runner" in name.lower()}


def test_parts_of_the_runner_know_no_runner():
    parts = {n: tree for n, tree in sources().items() if n.startswith("runner/")}
    for version in ("v1", "v2"):
        del parts[f"runner/{version}/runner.py"], parts[f"runner/{version}/setup.py"]
    assert {n: found for n, tree in parts.items() if (found := knows_a_runner(tree))} == {}


def assigned_in(method: ast.FunctionDef) -> set[str]:
    """Attributes of ``self`` that a method assigns."""
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and is_changed(node)
        if ast.unparse(node.value) == "self"
    }


START_UP = {"__init__", "load_model", "may_reinitialize_input_batch", "initialize_kv_cache"}
START_UP |= {"_allocate_planes", "_follow_cache", "_make_graph_manager", "_make_preparer"}
START_UP |= {"_replace_layers"}
IN_STEPS = {
    "runner/v1/runner.py": {
        "_begin_step": {"in_flight"},
        "_end_step": {"in_flight", "dummy_run"},
        "_dummy_run": {"dummy_run"},
        # Upstream reads it, and gets it for one request at a time
        "_scoring_alone": {"num_prompt_logprobs"},
    },
    "runner/v2/runner.py": {
        # The drafts of the last step, as the full check reads them
        "_begin_step": {"in_flight", "_draft_token_ids"},
        "_end_step": {"in_flight"},
        "prepare_dummy_attn": {"in_flight"},
        # Upstream's record of a step after the forward pass, which its own methods take in the same
        # way
        "sample_tokens": {"execute_model_state"},
        "pool": {"execute_model_state"},
    },
    "runner/common.py": {},
    "runner/v1/setup.py": {},
    "runner/v2/setup.py": {},
}
"""Attributes of the runners that change after start-up: the records of what is under way."""


@pytest.mark.parametrize("file", IN_STEPS)
def test_what_is_in_flight_is_one_record_of_one_place(file):
    """No mailbox: nothing else is left in an attribute for a later callback."""
    (runner,) = [node for node in sources()[file].body if isinstance(node, ast.ClassDef)]
    methods = [node for node in runner.body if isinstance(node, ast.FunctionDef)]
    assigned = {m.name: assigned_in(m) for m in methods if m.name not in START_UP}
    assert {name: names for name, names in assigned.items() if names} == IN_STEPS[file]


ANYONE = "chosen_platform compat.releases errors files progress ranks wording"
"""Modules that every folder but `prep/` may import."""

WALLS = {
    "prep": "prep",
    "config": "attention.families prep validation",
    "compat": "compat server",
    "compat.activation": "compat device server torchvision_import",
    "device": "compat.torch device prep",
    "ops": "aclnn compat.kernels config ops",
    # It computes where the core does
    "ops.cpu": "compat.torch ops.cpu prep.compiled prep.elements",
    "quantization": (
        "config ops.moe_method ops.npu.experts ops.npu.latent ops.npu.switches quantization"
    ),
    "attention": "attention config device prep",
    # Decodes absorb weights, which can't be int8 then
    "attention.mla": "attention config device prep quantization.loaded",
    "graph": "attention config device driver graph prep",
    "startup": (
        "aclnn attention.families attention.fused_calls attention.fused_releases "
        "attention.latent_releases attention.state_pages config device driver prep "
        "quantization.formats startup"
    ),
    # What Ray's workers are given names the folder of counts
    "startup.ray_cluster": "device observe.metrics",
    # What is told of a step, to whoever shows, keeps or checks it
    "records": "prep records validation",
    # It keeps steps; what shows them to people is no part of an engine
    "observe": "attention.families config graph.counts observe prep records",
    "server": "config observe.metrics server",
    "sleep": "device",
    # It belongs to no runner and no device
    "scheduling": "scheduling",
    # Loaders that upstream's reload can't read, how it measures graphs, its exchange of experts,
    # and names of its V2
    "runner": (
        "attention compat.eplb compat.models compat.v2 compat.worker config device graph observe "
        "ops prep quantization.rounding quantization.int8 runner startup.asked "
        "startup.subjects.ranks"
    ),
    # Rows call what the engine calls; the command reports versions as doctor finds them
    # Torch's forms of operators are those that layers take
    "verify": (
        "aclnn attention compat.executor compat.operators config device graph inspect.doctor "
        "ops.moe_lora ops.moe_topk ops.npu.experts ops.npu.rotary prep quantization.int8 verify"
    ),
    "inspect": "inspect prep records",
    # Other runners, in environments of which this plugin's own serving knows nothing
    "watch": "config observe prep records validation watch",
    # It asks an installation
    "inspect.doctor": (
        "aclnn attention.families attention.fused_releases config device driver inspect.doctor"
    ),
}
"""What each folder, or a file that differs from its folder, may import of the plugin."""

ENTRIES = {"", "cli", "platform", "worker"}
"""What vLLM and the shell start: these may import anything."""


@cache
def trees() -> dict[str, ast.AST]:
    return {module_of(name): tree for name, tree in sources().items()}


@cache
def uses() -> Graph:
    return imported_by(trees(), When.IMPORTED, When.CALLED)


def is_in(module: str, *folders: str) -> bool:
    return any(f"{module}.".startswith(f"{folder}.") for folder in folders)


def row_of(module: str) -> str:
    """The row of `WALLS` for a module: the longest that fits; empty if there is none."""
    return max((row for row in WALLS if is_in(module, row)), key=len, default="")


def walls_broken(module: str, used: set[str]) -> set[str]:
    """Of what a module uses, what it may not."""
    if module in ENTRIES:
        return set()
    row = row_of(module)
    allowed = f"{WALLS.get(row, '')} {ANYONE if row != 'prep' else ''}".split()
    return {each for each in used if each and not is_in(each, *allowed)}


def test_folders_import_what_is_theirs_to_import():
    broken = {module: walls_broken(module, used) for module, used in uses().items()}
    assert {module: found for module, found in broken.items() if found} == {}


def test_the_watch_needs_nothing_that_serves():
    """Nor does what it imports, and what its entry point imports: another vLLM may be there."""
    needed, new = set(), {module for module in uses() if is_in(module, "watch")}
    while new:
        needed |= new
        new = {each for module in new for each in uses().get(module, ())} - needed - {""}
    serving = ("compat", "device", "graph", "ops", "quantization", "runner", "startup", "verify")
    assert {module for module in needed if is_in(module, *serving, *ENTRIES - {""})} == set()
    at_first = imported_by(trees(), When.IMPORTED)
    assert at_first["watch"] | at_first["watch.attach"] <= {""}


FOLDERS_OF_ONE_ANOTHER = {
    ("compat", "device"): "start-up asks for a device, and devices name what torch lacks"
}
"""Folders that import from each other, and why they have to."""


def test_no_two_folders_import_from_each_other():
    folders = {module.partition(".")[0] for module in uses() if "." in module}
    imports = {
        (module.partition(".")[0], other.partition(".")[0])
        for module, used in uses().items()
        for other in used
    }
    both_ways = {(a, b) for a, b in imports if {a, b} <= folders and a < b and (b, a) in imports}
    assert both_ways == FOLDERS_OF_ONE_ANOTHER.keys()


def test_walls_allow_nothing_that_nobody_uses():
    used = {row: set().union(*(uses()[m] for m in uses() if row_of(m) == row)) for row in WALLS}
    idle = {
        (row, each)
        for row, allowed in WALLS.items()
        for each in set(allowed.split()) - {row}
        if not any(is_in(module, each) for module in used[row])
    }
    assert idle == set()


def missing_imports(tree: ast.Module) -> list[str]:
    """Names that a program imports from the package and that are no module and nothing in one."""
    missing = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_npu_prep"):
            path = "/".join(node.module.split(".")[1:])
            source = sources().get(f"{path}.py") or sources().get(f"{path}/__init__.py".lstrip("/"))
            has = {
                getattr(each, key, None)
                for each in (ast.walk(source) if source else ())
                for key in ("name", "id", "asname")
            }
            for name in (each.name for each in node.names):
                inner = f"{path}/{name}".lstrip("/")
                if (
                    name not in has
                    and not {f"{inner}.py", f"{inner}/__init__.py"} & sources().keys()
                ):
                    missing.append(f"{node.module}.{name}")
    return missing


def test_benchmarks_and_examples_import_what_the_package_has():
    """mypy does not read them, and most are not run by `make test`."""
    found = {
        f"{folder}/{name}": missing
        for folder in ("benchmarks", "examples")
        for name, tree in parsed(folder).items()
        if (missing := missing_imports(tree))
    }
    assert found == {}
    stale = "from vllm_npu_prep.graph import runner, counts"
    assert missing_imports(ast.parse(stale)) == ["vllm_npu_prep.graph.runner"]


def test_a_module_needs_none_that_waits_for_it():
    assert circle(with_packages(imported_by(trees(), When.IMPORTED))) == []


ANNOTATIONS = {("prep.checks", "prep.batch"): "a step is checked by the module that makes it"}
"""Imports for annotations that close a circle, and why it has to be."""


def test_imports_go_in_one_direction():
    """Those in functions and for annotations, too: a circle of them hides one thing in two."""
    graph = imported_by(trees(), *When)
    for module, other in ANNOTATIONS:
        assert circle({module: {other}, other: graph[other]}), "no circle any more"
        graph[module].remove(other)
    assert circle(graph) == []


LONG = {
    "prep/oracle.py": "every array of a step in plain loops, a function for each kind of layer",
    "inspect/explain.py": "every table of a step that explain prints, a function each",
    "platform.py": "every question of vLLM about a device, a few lines each",
    "records/scenario.py": "every field of a scenario file, and the rules for them",
    "runner/v1/runner.py": "every override of upstream's runner in a step, a few lines each",
    "worker.py": "every override of upstream's worker, from its start to its sleep",
    "runner/v2/runner.py": "the same of upstream's V2 runner",
}
"""Files of more than 500 lines: what their one job is."""


def test_a_long_file_says_what_its_one_job_is():
    """A second job, else give the reason in `LONG`."""
    files = [*(PACKAGE / name for name in sources())]
    files += [ROOT / "emulator/ascend_emulator" / name for name in emulator()]
    long = {path for path in files if len(path.read_text().splitlines()) > 500}
    assert long == {PACKAGE / name for name in LONG}


# ----------------------------------------------------------------- waiting by time

MAY_SLEEP = {
    "helpers/waiting.py": "looks again and again, up to a limit, for everybody else",
    "emulator/ranks.py": "looks which of several processes ended, until one has failed",
    "engine/test_mooncake_store.py": "loads are late: who does not wait for them goes on before",
    "soak/transfers.py": "a transfer is late, or stalls, for a time that is drawn",
    "server/test_lifecycle.py": "a process is killed at a moment that is drawn",
    "server/test_ray.py": "a host is killed at a moment that is drawn",
    "server/loaded.py": "a step is slow because a client asks for that",
    "server/test_server.py": "clients hang up at moments that are drawn",
}
"""Why a test may sleep: not for something that another thread or process does."""
WAITS = re.compile(
    r"\b(?:time|asyncio)\.sleep\((?!0\))"  # in programs that tests write, too
    r"|assert (?:time\.)?(?:monotonic|perf_counter|time)\(\) - \w+ <"
)


def test_no_test_waits_by_time():
    """It waits for the thing: by an event, a line, a file, or `tests.helpers.waiting`.

    Nor does a test limit the time of something.
    """
    found = {name: len(WAITS.findall(text)) for name, text in TESTS.items()}
    found.pop("test_walls.py")
    assert {name: n for name, n in found.items() if n} == dict.fromkeys(MAY_SLEEP, 1)


def test_names_of_tests_can_be_read_in_one_line():
    """They have 60 characters at most. A rule that is longer stands in the docstring."""
    long = {name: re.findall(r"def (test_\w{56,})", text) for name, text in TESTS.items()}
    assert {name: found for name, found in long.items() if found} == {}


# ----------------------------------------------------------------- the walls themselves
