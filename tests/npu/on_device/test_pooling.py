"""Pooling models on npu:0: close to transformers in float32, over the operators of each family."""

import pytest

from tests.helpers.counting import PreparationCounts
from tests.helpers.engine import engine, make_model, runner_of, save_tokenizer
from tests.helpers.pooling import check_close, hidden_states, normalized, pooled
from tests.helpers.prompts import prompts_of
from tests.helpers.watch import count_states

LENGTHS = [3, 1, 150, 40, 90, 17, 64, 129]
TOLERANCE = 5e-3  # of float16 against float32; other prompts are 0.1 and more away


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes a model with a tokenizer, with weights small enough for half precision."""

    def make(*args, **config):
        path = make_model(tmp_path_factory.mktemp("model"), *args, spread=0.15, **config)
        save_tokenizer(path)
        return path

    return make


def settings(attention: str, **more) -> dict:
    return {
        "runner": "pooling",
        "skip_tokenizer_init": False,
        "dtype": "float16",
        "max_model_len": 160,
        "additional_config": {"npu_prep": {"attention": attention}},
        **more,
    }


def test_embeddings_of_a_causal_model(folder, seed):
    model = folder("Qwen3")
    prompts = prompts_of(seed, LENGTHS)
    pieces = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8, 48]}
    graphs = {"enforce_eager": False, "compilation_config": pieces}
    with engine(model, **settings("fia", max_num_batched_tokens=48, **graphs)) as llm:
        states = count_states(llm)
        got = pooled(llm, prompts, "embed")
        assert str(runner_of(llm).device) == "npu:0"
    check_close(got, [normalized(rows[-1]) for rows in hidden_states(model, prompts)], TOLERANCE)
    assert {"PrefillNoCache", "ChunkedPrefill"} <= set(states)


BERT = {"num_key_value_heads": 4}
WINDOWS = {**BERT, "num_hidden_layers": 3, "local_attention": 16, "global_attn_every_n_layers": 3}


@pytest.mark.parametrize(
    ("attention", "family", "config"), [("fia", "Bert", BERT), ("atb", "ModernBert", WINDOWS)]
)
def test_embeddings_of_an_encoder(folder, attention, family, config, seed):
    model = folder(family, "Model", **config)
    prompts = prompts_of(seed, LENGTHS)
    with engine(model, **settings(attention, max_num_batched_tokens=200)) as llm:
        counts = PreparationCounts(runner_of(llm))
        got = pooled(llm, prompts, "embed")
        assert str(runner_of(llm).device) == "npu:0"
        waits = runner_of(llm).preparer.staging.waits
    check_close(got, [normalized(rows[0]) for rows in hidden_states(model, prompts)], TOLERANCE)
    for step in counts.steps:  # one copy and nothing else: no cache, no block tables
        assert step.pop("h2d_copies") == 1
        assert not set(step) - {"h2d_bytes", "peak_memory_bytes"}, step
    assert waits == 0
