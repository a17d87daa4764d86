"""Experts that move among ranks on cards: tokens, weights by the map, and no hazard.

The same on the CPU fallback, with more layouts: `tests/engine/test_eplb.py`.
"""

from functools import partial

import numpy as np
import pytest

from tests.helpers.engine import graphs
from tests.helpers.eplb import assert_weights_follow_the_map, exchanged, moving
from tests.helpers.huggingface import logits_by
from tests.helpers.quantized import QUANTIZE, rounded_model
from tests.helpers.ranks import serve_on_ranks
from tests.helpers.v2 import asked_for
from tests.npu.inputs import prompts
from tests.npu.models import PARTED, bound_of, judges_of, lacks, make

SETTINGS = {
    "dtype": "bfloat16",
    "block_size": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 32 << 20,
    "additional_config": {"npu_prep": {"check": "cheap"}},
}
GRAPHS = graphs("FULL_AND_PIECEWISE", 4, 16)
TP2, DP2 = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
AT_ONCE = {"use_async": False}
CASES = {  # settings, settings of the exchange, a model, the runner, how it is quantised
    "ranks": (TP2 | GRAPHS, {}, "Qwen3Moe", "V2", {}),
    "ranks, at once, V1": (TP2, AT_ONCE, "Qwen3Moe", "V1", {}),
    "engines, V1": (DP2 | GRAPHS, {}, "Qwen3Moe", "V1", {}),
    "latent": (TP2 | GRAPHS, {}, "DeepSeek V3", "V2", {}),
    "W8A8": (TP2 | GRAPHS, {}, "Qwen3Moe", "V2", {"form": "modelslim"}),
    "W4A8": (
        TP2 | GRAPHS,
        {},
        "wide Qwen3Moe",
        "V2",
        {"form": "modelslim", "scheme": "W4A8", "group": 0},
    ),
    "W4A16": (
        TP2 | GRAPHS,
        {},
        "Qwen3Moe",
        "V2",
        {"form": "compressed-tensors", "scheme": "W4A16", "group": 32},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_best_by_transformers_whatever_moves(tmp_path, name):
    """In rounds between which experts move; a replay reads them where they were captured."""
    settings, exchange, family, runner, how = CASES[name]
    model = made = make(tmp_path, family)
    if how:
        made = tmp_path / "quantised"
        QUANTIZE(model, made, **how)
    traffic = partial(exchanged, prompts=prompts(), num_tokens=12)
    with asked_for(runner):
        given = SETTINGS | settings | moving(6, **exchange)
        got = serve_on_ranks(made, given, traffic)
    assert_weights_follow_the_map(got["experts"])
    judges = judges_of(model, False)
    if how:
        judges = [logits_by(rounded_model(model, made, 2))] * len(prompts())
    for tokens in got["tokens"]:
        judged = zip(judges, prompts(), tokens, strict=True)
        lacking = np.stack([lacks(judge, prompt, row) for judge, prompt, row in judged])
        assert lacking.max() < bound_of(family, "bfloat16", bool(how)), lacking.round(3)
        assert (lacking > 0).mean() < 1 / PARTED
