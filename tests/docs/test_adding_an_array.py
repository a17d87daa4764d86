"""The page that shows how an array is added: its three lines are enough for all that follows."""

import os
import re
import shutil
import subprocess
import sys

from tests.docs.pages import PAGES, ROOT

LOOK_AT_IT = """
import json, sys
from pathlib import Path

import torch

import vllm_npu_prep
from tests.helpers.records import record_of
from vllm_npu_prep.device.staging import TypedBuffer
from vllm_npu_prep.inspect.explain import explain_json
from vllm_npu_prep.records.record_file import read_record
from vllm_npu_prep.records.comparison import core_difference, oracle_difference
from vllm_npu_prep.records.scenario import parse_scenario
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.prep.batch import prepare_step

name, folder = sys.argv[1], Path(sys.argv[2])
assert Path(vllm_npu_prep.__file__).is_relative_to(folder)
example = json.loads((folder / "tests/worked_examples/chunked-prefill.json").read_text())
scenario = parse_scenario(example["scenario"] | {"capture_sizes": [8]})
step = scenario.record().prepare()
last_of_each = [3, 2, 7]
assert getattr(step, name).tolist() == last_of_each
assert getattr(step.arrays, name).tolist() == [*last_of_each, 0], "padding"

buffer = TypedBuffer(torch.from_numpy(step.arrays.buffer))
assert getattr(buffer.arrays(step.layout), name).tolist() == [*last_of_each, 0], "on the device"

assert explain_json(StepView.of_scenario(scenario))[name] == last_of_each

path = folder / "step-000000.npz"
path.write_bytes(record_of(step).to_bytes())
record = read_record(path)
assert record.prepared[f"{name}_padded"].tolist() == [*last_of_each, 0]
assert core_difference(record) is None and oracle_difference(record) is None
record.prepared[name][1] += 1
for found in (core_difference(record), oracle_difference(record)):
    assert (found.variable, found.index, found.req_id) == (name, (1,), "r1"), found
"""


def added_lines() -> dict[str, list[tuple[str, str]]]:
    """By file: a line that is there, and the line that comes after it."""
    (block,) = (b for b in PAGES["docs/changing/adding.md"].blocks if b.language == "diff")
    added: dict[str, list[tuple[str, str]]] = {}
    path = before = ""
    for line in block.text.splitlines():
        if line.startswith("+++ "):
            path = line[4:]
        elif line.startswith("+"):
            added.setdefault(path, []).append((before, line[1:]))
        else:
            before = line[1:]
    return added


def test_the_lines_of_the_page_add_an_array(tmp_path):
    added = added_lines()
    files = ("arrays", "fused_pass", "oracle")
    assert sorted(added) == [f"vllm_npu_prep/prep/{name}.py" for name in files]
    ignored = shutil.ignore_patterns("__pycache__", "emulator")
    shutil.copytree(ROOT / "vllm_npu_prep", tmp_path / "vllm_npu_prep", ignore=ignored)
    for folder in ("helpers", "worked_examples"):
        shutil.copytree(ROOT / "tests" / folder, tmp_path / "tests" / folder, ignore=ignored)
    (tmp_path / "tests" / "__init__.py").touch()
    for path, lines in added.items():
        text = (tmp_path / path).read_text()
        for before, line in lines:
            assert text.count(f"{before}\n") == 1, f"{path}: {before}"
            text = text.replace(f"{before}\n", f"{before}\n{line}\n")
        (tmp_path / path).write_text(text)
    (name,) = re.findall(r"(\w+): A = array", added["vllm_npu_prep/prep/arrays.py"][0][1])
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NPU_PREP_DEVICE": "cpu"}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", LOOK_AT_IT, name, str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
