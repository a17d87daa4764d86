"""Start-up on emulated cards: what it refuses, and engines in other environments."""

import json

import pytest

from tests.helpers.emulator import emulate, why_no_emulator
from tests.helpers.engine import make_model
from tests.helpers.hybrids import ON_NPUS

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

CONFIGURE = """
import json
import sys
from tests.helpers.engine import engine_config
from vllm_npu_prep.errors import PrepError
for model, settings in json.load(sys.stdin):
    try:
        config = engine_config(model, **{"dtype": "float16", **settings})
    except PrepError as error:
        print("SAID", json.dumps(str(error)))
    else:
        print("SAID", json.dumps(config.compilation_config.cudagraph_capture_sizes))
"""
REFUSED = {
    "bfloat16, float16": {"dtype": "float32"},
    "multiples of 16": {"block_size": 24},
    "npu": {"additional_config": {"npu_prep": {"attention": "reference"}}},
    "compressed": {"additional_config": {"npu_prep": {"mask": "dense"}}},
    "FULL_AND_PIECEWISE": {
        "additional_config": {"npu_prep": {"attention": "atb"}},
        "compilation_config": {"cudagraph_mode": "FULL"},
    },
    "KV connector NixlConnector is not supported": {
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        "enable_chunked_prefill": False,
    },
    "4 ranks on this host: 2 NPUs are visible": {"data_parallel_size": 4},
}
ON_8_5 = ("CANN 8.5.0 for", "no aclnnChunkGatedDeltaRule", "install CANN 9.1 or newer")


def test_what_an_npu_cannot_run_is_refused_in_one_line(tmp_path):
    """On CANN 8.5, which has no operators for states. Too many sizes of graphs are thinned: 1800
    streams for 65 pieces of each size and one whole model."""
    model = str(make_model(tmp_path / "model"))
    states = str(make_model(tmp_path / "states", "Qwen3_5", **ON_NPUS, head_dim=256))
    deep = {"num_hidden_layers": 64, "hidden_size": 16, "head_dim": 16}
    deep = str(make_model(tmp_path / "deep", **deep))
    asked = [(model, settings) for settings in REFUSED.values()]
    asked += [(states, {"dtype": "bfloat16"}), (deep, {"max_num_seqs": 256})]
    options = ("--devices", "2", "--profile", "8.5")
    ran = emulate("-c", CONFIGURE, options=options, given=json.dumps(asked))
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    lines = [line for line in ran.stdout.splitlines() if line.startswith("SAID ")]
    *refusals, of_states, sizes = (json.loads(line.removeprefix("SAID ")) for line in lines)
    for said, message in zip(refusals, REFUSED, strict=True):
        assert message in said and "\n" not in said
    for part in ON_8_5:
        assert part in of_states
    assert " thinned to 27 (66 streams for each, 1800 for all)" in ran.stdout
    assert len(sizes) == 27 and {1, 256, 512} <= set(sizes)


def test_a_chip_that_is_not_supported_is_refused_in_one_line(tmp_path):
    model = str(make_model(tmp_path / "model"))
    code = (
        f"from tests.helpers.engine import engine_config; engine_config({model!r}, dtype='float16')"
    )
    ran = emulate("-c", code, options=("--soc", "Ascend310P3"))
    assert ran.returncode != 0
    (line,) = [row for row in ran.stderr.splitlines() if "vllm_npu_prep: error" in row]
    assert "Ascend310P" in line
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ((), {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"}),
        ((), {"TASK_QUEUE_ENABLE": "2"}),
        (("--driver", "24.1.RC3"), {}),  # under it no full graph is captured
    ],
    ids=["segments", "task queue", "old driver"],
)
def test_engines_run_in_other_environments(options, environment, tmp_path):
    tokens = "tests/npu/on_device/test_tokens.py::test_tokens_are_the_best_by_transformers"
    options = ("--delay", "skewed", "--report", str(tmp_path / "report.json"), *options)
    ran = emulate("-m", "pytest", f"{tokens}[fia, graphs]", options=options, **environment)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    calls = json.loads((tmp_path / "report.json").read_text())["calls"]
    # Segments expand unless the user says otherwise.
    assert (calls.get("aclrtMapMem", 0) > 0) != ("PYTORCH_NPU_ALLOC_CONF" in environment)
