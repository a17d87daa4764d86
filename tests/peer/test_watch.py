"""The watch of vllm-ascend on the emulated card: silent, or it names each fault.

One engine of each runner has all at once: graphs, drafts of an EAGLE head of which some are
rejected, chunks, prefix hits and preemptions. The faults are those of `tests.peer.faults`. But for
them and for rotary embedding (`tests.peer.watched`), vllm-ascend is unmodified.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.emulator import ROOT
from tests.helpers.models import drafts_by, folder_of
from tests.peer.faults import STEP
from tests.peer.test_peer import CACHE, ENVIRONMENT, LIMIT, SIZES, error_of
from vllm_npu_prep.cli import main

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / ".installed").exists(),
    reason=f"{ENVIRONMENT.relative_to(ROOT)} is not there: make peer",
)
MODEL = "Qwen3ForCausalLM"
NUM_TOKENS = 10


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 37 + n * 11) % 400 + 2 for n in range(length)]


TRAFFIC = [
    [prompt(118, 1), prompt(119, 2), prompt(116, 3), prompt(117, 4)],  # blocks are too few for all
    [prompt(270, 5)],
    [[*prompt(270, 5), 7, 8, 9], prompt(119, 2)],  # one begins as another did
    [prompt(20, 6), prompt(12, 7)],  # with these, faults are planted
]
FAULT = re.compile(
    r"Step (?P<step>\d+) of (?P<runner>.+?): step check \"(?P<rule>.+?)\": .+?: "
    r"request (?P<request>[\w-]+)(, token (?P<token>\d+))?.*: given (?P<given>.+), "
    r"allowed (?P<allowed>.+)"
)


RULES = {
    "slot_off_by_one": "table",
    "stale_seq_lens": "lengths",
    "stale_seq_lens_of_attention": "seq_lens of layers",
    "another_row_of_the_table": "write into another's block",
    "another_token": "input_ids",
    "buffer_rewritten_early": "table",
    "rejected_drafts_stay": "computed tokens",
}
OF_RUNNER = [
    {"pr_8461": "seq_lens of layers", "pr_12630": "", "pr_6835": "", "pr_7019": ""},
    {"buffer_rewritten_early": "query lengths", "pr_10250": "seq_lens of layers"},
]
"""The rule that names each fault; those of V1 and V2 alone. Without a rule, nothing is named."""
PROMPTS = {"pr_6835": [prompt(3, 7)]}
"""Of faults that need their own: of as many tokens as a decode with its drafts."""
LET_PASS = (
    "write after read * after device-to-host copy on stream * of npu:0,",
    "pinned source of * bytes, copied on stream 0 of npu:0, was rewritten",
)
"""Hazards of drafts on V1, whose reading is on the page of vllm-ascend without a card."""


@pytest.fixture(scope="module")
def metadata(tmp_path_factory) -> Path:
    """Folder with this package's entry points, as an installation beside vllm-ascend has them."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "egg_info", "--egg-base", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=LIMIT)
    return folder


def served(metadata: Path, v2: bool, traffic: Any, faults: Any = (), **environment: str) -> str:
    """All that an engine has printed."""
    engine: dict[str, Any] = {
        **SIZES,
        "model": str(folder_of(MODEL)),
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 6,
        "speculative_config": drafts_by(MODEL, "eagle"),
        "compilation_config": {
            "cudagraph_capture_sizes": [6, 12],
            "cudagraph_mode": "FULL_DECODE_ONLY",
        },
    }
    job = {"engine": engine, "traffic": traffic, "tokens": NUM_TOKENS}
    job |= {"faults": {fault: PROMPTS.get(fault, traffic[-1]) for fault in faults}}
    options = [part for pattern in LET_PASS for part in ("--allow-hazard", pattern)]
    command = [*options, "--", "python", ROOT / "tests/peer/watched.py"]
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "ascend-emulator", *command],
        cwd=ROOT,
        env={
            **{
                name: value
                for name, value in os.environ.items()
                if name not in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "NPU_PREP_DEVICE")
            },
            "PYTHONPATH": f"{metadata}:{ROOT}:{ROOT / 'emulator'}",
            "OMP_NUM_THREADS": "1",
            "VLLM_CACHE_ROOT": str(CACHE),
            "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
            **environment,
        },
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, error_of(done.stdout)
    assert f"TOKENS {[[NUM_TOKENS] * len(prompts) for prompts in traffic]}" in done.stdout
    return done.stdout


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_each_fault_is_named_and_nothing_else(v2, metadata, tmp_path, capsys):
    watch = {"NPU_PREP_WATCH": json.dumps({"record": {"dir": str(tmp_path), "steps": "last 256"}})}
    if v2:  # another way to have both plugins
        watch["VLLM_PLUGINS"] = "ascend,npu_prep_watch"
    rules = RULES | OF_RUNNER[v2]
    names = list(rules)
    right, *sections = served(metadata, v2, TRAFFIC, names, **watch).split("FAULT ")
    runner = f"vllm-ascend's V{1 + v2} runner"
    assert f"Watching {runner} (0.26.0rc1), check full" in right
    assert not FAULT.search(right) and "has failed" not in right
    [seen] = re.findall(r"SEEN (.*)", right)
    assert min(json.loads(seen).values()) > 0, seen
    said = {each.split()[0]: each for each in sections}
    assert list(said) == names
    for name, section in said.items():
        found = [match for match in map(FAULT.search, section.splitlines()) if match]
        rule = rules[name]
        assert [match["rule"] for match in found] == ([rule] if rule else []), section
        assert found or "REACHED" in section
        for planted in re.findall(r"PLANTED (.*)", section):
            [match], where = found, json.loads(planted)
            assert (match["step"], match["runner"]) == (str(STEP), runner)
            assert match["request"] == where["request"]
            assert where["right"] in map(int, re.findall(r"\d+", match["allowed"])), section
    steps = sorted(tmp_path.iterdir())
    assert main(["replay", str(steps[0])]) == 0
    assert "core and oracle prepare what was recorded" in capsys.readouterr().out
    assert main(["replay", str(steps[1]), "--step", str(STEP)]) == 1


def test_without_the_variable_vllm_ascend_serves_as_ever(metadata):
    assert "atching" not in served(metadata, v2=False, traffic=TRAFFIC[1:2])
