"""``verify-device --calls`` beside kernels that are planted: each is found, and named, by its row.

Kernels that are wrong in graphs, for wide rows, or slow, and what an engine makes of a table, are
in `tests/npu/on_device/test_verified.py`.
"""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.helpers.emulator import ROOT, emulate, why_no_emulator
from tests.helpers.waiting import wait_until
from vllm_npu_prep.verify.calls.call import Call, write_list
from vllm_npu_prep.verify.calls.table import read_table

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

GELU, SWIGLU, MROPE = (f"npu::npu_{name}" for name in ("gelu", "dequant_swiglu_quant", "mrope"))
ATTENTION = "npu::npu_fused_infer_attention_score"
FAULTS = "early-maximum,stale-lengths"
CARD = ("--profile", "8.5", "--fault", FAULTS, "--references", "tests.npu.planted_kernels")
COMMAND = ("-m", "vllm_npu_prep.cli", "verify-device", "--json", "--resume")


def tensor(*shape: int, dtype: str = "bfloat16") -> dict:
    return {"dtype": dtype, "shape": [*shape]}


def rounded(columns: int) -> Call:
    return Call(SWIGLU, {"x": tensor(49, 2 * columns), "activate_left": True, "quant_mode": 1})


def turned(heads: int) -> Call:
    rows = {"query": tensor(7, heads * 128), "key": tensor(7, 256)}
    table = {"cos_sin_cache": tensor(32, 128), "head_size": 128}
    return Call(MROPE, {"positions": tensor(7, dtype="int64"), **rows, **table})


def decode() -> Call:
    """Attention over a cache, by two requests of one token."""
    plane = tensor(4, 128, 128)
    blocks = tensor(2, 1, dtype="int32") | {"values": [0, 2]}
    lengths = {"actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": [100, 37]}
    sizes = {"num_heads": 4, "num_key_value_heads": 2, "block_size": 128, "scale": 0.125}
    tensors = {"query": tensor(2, 4, 64), "key": plane, "value": plane, "block_table": blocks}
    written = {"out": [tensor(2, 4, 64), tensor(0, dtype="float32")], "workspace": tensor(4096)}
    given = {**tensors, **lengths, **sizes, "input_layout": "TND", **written}
    return Call(f"{ATTENTION}.out", given, captured=True)


CALLS = {
    "npu_gelu-001": Call(GELU, {"input": tensor(1, 64)}),
    "npu_gelu-002": Call(GELU, {"input": tensor(7, 64)}),
    "npu_gelu-003": Call(GELU, {"input": tensor(8, 64)}, captured=True),
    f"{ATTENTION[5:]}.out-001": decode(),
    "npu_dequant_swiglu_quant-001": rounded(1024),
    "npu_dequant_swiglu_quant-002": rounded(9216),
    "npu_mrope-001": turned(32),
    "npu_mrope-002": turned(64),
}
BAD = {
    "npu_gelu-003": ("DEAD", "no end after 30 seconds"),
    "npu_dequant_swiglu_quant-002": ("DIFFERS", " differ"),
    f"{ATTENTION[5:]}.out-001": ("DIFFERS", "replayed with its own numbers"),
    "npu_mrope-002": ("DEAD", "its process died of SIGFPE"),
}


def named(folder: str) -> list[psutil.Process]:
    """Processes whose command names a folder."""
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if folder in " ".join(each.info["cmdline"] or ())]


def test_planted_kernels_are_found_by_a_run_that_goes_on(tmp_path):
    """One that is killed loses nothing: the next one runs no row again that it has finished."""
    table = tmp_path / "table.jsonl"
    write_list(tmp_path / "calls.jsonl", {"model": "some", "config": {}}, CALLS.values())
    files = ("--calls", str(tmp_path / "calls.jsonl"), "--table", str(table))
    command = [sys.executable, "-m", "ascend_emulator", *CARD, "--", sys.executable, *COMMAND]
    with subprocess.Popen([*command, *files], cwd=ROOT, start_new_session=True) as run:
        wait_until(lambda: table.exists() and table.read_text().count("\n") == 3)
        os.killpg(run.pid, signal.SIGKILL)  # while the third call hangs
    wait_until(lambda: not named(str(tmp_path)))  # nobody is left who holds the card
    former = read_table(table).results
    done = emulate(*COMMAND, *files, "--row-seconds", "30", options=CARD)
    found = {result.name: result for result in read_table(table).results.values()}
    assert done.returncode == 1 and found.keys() == CALLS.keys(), done.stderr[-4000:]
    assert [found["npu_gelu-001"], found["npu_gelu-002"]] == [*former.values()]
    for name, result in found.items():
        verdict, got = BAD.get(name, (result.verdict, ""))
        form = None if ATTENTION in result.what else ""
        assert (result.verdict, result.torch_got) == (verdict, form), result
        assert got in result.got and result.verdict.is_bad == (name in BAD), result
