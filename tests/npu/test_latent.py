"""Latent attention on npu:0: tokens are the CPU fallback's, in every state and in graphs.

What only hardware can show (numerics, speed, layout limits of real kernels) is not shown here.
"""

import json

import pytest

from tests.helpers.emulator import emulate, why_no_emulator
from tests.helpers.engine import make_model
from tests.helpers.latent import LATENT_ON_NPUS, V3_EXPERTS_ON_NPUS
from tests.npu import generate
from tests.npu.close_calls import same_but_close_calls

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

MODELS = {
    "dense": {"first_k_dense_replace": 2, "n_routed_experts": 0},
    "experts": V3_EXPERTS_ON_NPUS,
}
CASES = {"experts": "async/FULL_AND_PIECEWISE", "dense": "sync/FULL_AND_PIECEWISE/ngram"}
"""What the engine of each model does."""


def test_tokens_equal_those_of_the_fallback(tmp_path):
    """Prompts in chunks with contexts, shared prefixes; decodes and drafts in full graphs."""
    how = {"spread": 0.1, "embedding_scale": 20, "q_lora_rank": 96, **LATENT_ON_NPUS}
    models = {
        layers: make_model(tmp_path / layers, "DeepseekV3", **how, **config)
        for layers, config in MODELS.items()
    }
    out, report = tmp_path / "tokens.json", tmp_path / "report.json"
    names = {layers: f"{models[layers]}:fia:bfloat16/{case}" for layers, case in CASES.items()}
    result = emulate(
        *("-m", "tests.npu.generate", str(out), *names.values()),
        options=("--delay", "skewed", "--report", str(report)),
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert json.loads(report.read_text())["hazards"] == []
    results = json.loads(out.read_text())
    states = {"PrefillNoCache", "ChunkedPrefill", "DecodeOnly"}
    for layers, name in names.items():
        got, model = results[name], models[layers]
        assert "error" not in got, f"{layers}\n{got['error']}"
        assert got["device"] == "npu:0"
        assert states <= set(got["states"]), got["states"]
        assert {"full graph", "piecewise graphs"} <= set(got["steps"]), got["steps"]
        reference = generate.run(model, "reference", "bfloat16", "async", "eager")
        same_but_close_calls(model, "async", got, reference)
    drafts = results[names["dense"]]
    assert drafts["states"]["SpecDecoding"] and drafts["verified"]["accepted"]
