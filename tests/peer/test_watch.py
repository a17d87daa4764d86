"""The watch of vllm-ascend, unmodified, on the emulated card: silent, or it names a fault."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.emulator import ROOT
from tests.helpers.engine import make_model
from tests.peer.test_peer import ENVIRONMENT, LIMIT, SIZES
from tests.peer.watched import STEP
from vllm_npu_prep.cli import main

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / ".installed").exists(),
    reason=f"{ENVIRONMENT.relative_to(ROOT)} is not there: make peer",
)
PROMPTS = [list(range(2, 40)), list(range(50, 60))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_model(folder, num_hidden_layers=1, head_dim=128, dtype="bfloat16")


@pytest.fixture(scope="module")
def metadata(tmp_path_factory) -> Path:
    """Folder with this package's entry points, as an installation beside vllm-ascend has them."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "egg_info", "--egg-base", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=LIMIT)
    return folder


def served(model: Path, metadata: Path, v2: bool, plant: bool, **environment: str) -> str:
    """All that an engine has printed."""
    engine: dict[str, Any] = {**SIZES, "model": str(model), "skip_tokenizer_init": True}
    job = {"engine": engine | {"enforce_eager": True}, "prompts": PROMPTS, "tokens": 6}
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "ascend-emulator", "--", "python", ROOT / "tests/peer/watched.py"],
        cwd=ROOT,
        env={
            **{
                name: value
                for name, value in os.environ.items()
                if name not in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "NPU_PREP_DEVICE")
            },
            "PYTHONPATH": f"{metadata}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
            **environment,
        },
        input=json.dumps(job | {"plant": plant}),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "TOKENS [6, 6]" in done.stdout
    return done.stdout + done.stderr


@pytest.mark.parametrize("plant", [False, True], ids=["right", "slot off by one"])
@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_a_fault_is_named_and_nothing_else(v2, plant, model, metadata, tmp_path, capsys):
    record = {"dir": str(tmp_path), "steps": "0:100"}
    watch = {"NPU_PREP_WATCH": json.dumps({"record": record})}
    if plant:  # both ways to have both plugins
        watch["VLLM_PLUGINS"] = "ascend,npu_prep_watch"
    said = served(model, metadata, v2, plant, **watch)
    runner = f"vllm-ascend's V{1 + v2} runner"
    assert f"Watching {runner} (0.26.0rc1), check full" in said
    faults = re.findall(r"Step (\d+) of (.+?): step check \"(.+?)\": .*", said)
    if not plant:
        assert faults == [] and "has failed" not in said
        assert main(["replay", str(tmp_path)]) == 0
        assert "core and oracle prepare what was recorded" in capsys.readouterr().out
        return
    assert faults == [(str(STEP), runner, "table")]
    [right] = map(int, re.findall(r"PLANTED (\d+)", said))
    assert f"token 0, KV-cache group 0: given {right + 1}, allowed {right}, in its block" in said
    assert main(["replay", str(tmp_path), "--step", str(STEP)]) == 1
    assert "slot_mapping[0] (token 0" in capsys.readouterr().out


def test_without_the_variable_vllm_ascend_serves_as_ever(model, metadata):
    assert "atching" not in served(model, metadata, v2=False, plant=False)
