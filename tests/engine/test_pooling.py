"""Pooling models end to end: embeddings, classes, scores and rewards are those of transformers."""

import pytest
import torch
from vllm import PoolingParams
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)

from tests.conftest import SEED
from tests.helpers.engine import make_model, runner_of, save_tokenizer
from tests.helpers.pooling import check_close, hidden_states, normalized, pooled
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import QUANTIZE, change_tensors, tensors_in
from tests.helpers.v2 import RUNNERS, engine_of, on_both
from tests.helpers.watch import count_preemptions, count_states
from vllm_npu_prep.compat.releases import is_since
from vllm_npu_prep.errors import PrepError

LENGTHS = [3, 1, 150, 40, 90, 17, 2, 64, 65, 33]
POOLING = {"runner": "pooling", "skip_tokenizer_init": False, "max_model_len": 160}
WHOLE_PROMPTS = {**POOLING, "max_num_batched_tokens": 200}
PIECES = {
    "enforce_eager": False,
    "compilation_config": {
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": [8, 16, 32, 48, 128],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):

    def make(*args, **config):
        path = make_model(tmp_path_factory.mktemp("model"), *args, **config)
        save_tokenizer(path)
        return path

    return make


@pytest.fixture(scope="module")
def qwen3(folder):
    return folder("Qwen3")


@pytest.fixture(scope="module")
def bert(folder):
    return folder("Bert", "Model", num_key_value_heads=4)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "settings",
    [{"async_scheduling": False}, {"async_scheduling": True, **PIECES}],
    ids=["sync, eager", "async, pieces"],
)
def test_embeddings_of_a_causal_model_in_chunks(qwen3, seed, settings, runner):
    prompts = prompts_of(seed, LENGTHS)
    later = [prompt + prompt[:5] for prompt in prompts[2:6]]  # most of them are cached by then
    with engine_of(
        runner, qwen3, **POOLING, max_num_batched_tokens=48, block_size=16, **settings
    ) as llm:
        states = count_states(llm)
        got = pooled(llm, prompts, "embed")
        steps = states.total()
        got += pooled(llm, later, "embed")
        counts = runner_of(llm).padding.counts.by_kind
    check_close(got, [normalized(rows[-1]) for rows in hidden_states(qwen3, prompts + later)])
    assert {"PrefillNoCache", "ChunkedPrefill"} <= set(states)
    assert states.total() - steps <= 3  # 273 tokens in steps of 48
    if "compilation_config" in settings:
        assert counts["piecewise graphs"] > 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_rows_for_each_token_outlive_the_steps_of_their_chunks(qwen3, seed, runner):
    """Those of a prompt that is preempted between two of them count once (vllm#55192)."""
    prompts = prompts_of(seed, LENGTHS)
    config = {"pooler_config": {"task": "token_embed"}, "max_num_batched_tokens": 48}
    few = {"block_size": 16, "num_gpu_blocks_override": 12, "long_prefill_token_threshold": 16}
    with engine_of(runner, qwen3, **POOLING, **config, **few) as llm:
        preempted = count_preemptions(llm)
        got = pooled(llm, prompts, "token_embed")
    check_close(got, [normalized(rows) for rows in hidden_states(qwen3, prompts)])
    assert preempted["preempted"] > 0


@pytest.mark.parametrize(("form", "runner"), on_both({each: each for each in ("pieces", "int8")}))
def test_embeddings_of_an_encoder(bert, tmp_path, seed, form, runner):
    prompts, int8, settings = prompts_of(seed, LENGTHS), None, {}
    if form == "int8":
        int8 = tmp_path / "int8"
        QUANTIZE(bert, int8, "compressed-tensors")
        assert sum(each.dtype == torch.int8 for each in tensors_in(int8).values()) == 12
    else:
        settings = PIECES
    with engine_of(runner, int8 or bert, **WHOLE_PROMPTS, **settings) as llm:
        states, counts = count_states(llm), runner_of(llm).padding.counts.by_kind
        got = pooled(llm, prompts, "embed")
        assert not runner_of(llm).kv_caches
    rows = hidden_states(bert, prompts, int8=int8)
    check_close(got, [normalized(each[0]) for each in rows])
    assert set(states) == {"PrefillNoCache"}
    assert (counts["piecewise graphs"] > 0) == bool(settings)


def test_an_int8_copy_without_the_head_is_refused(folder, tmp_path, monkeypatch):
    """vLLM gives the head no name, so that nothing can leave it out of int8."""

    def what_memory_may_hold(self, layer, *args, **extra):
        upstream(self, layer, *args, **extra)
        layer.weight_scale.data.fill_(0.5)

    upstream = CompressedTensorsLinearMethod.create_weights
    monkeypatch.setattr(CompressedTensorsLinearMethod, "create_weights", what_memory_may_hold)
    model, generator = folder("Qwen2"), torch.Generator().manual_seed(SEED)
    shapes = {"0.weight": (64, 64), "0.bias": (64,), "2.weight": (2, 64), "2.bias": (2,)}
    head = {f"score.{n}": torch.randn(s, generator=generator) / 8 for n, s in shapes.items()}
    change_tensors(model, lambda tensors: tensors.update(head))
    QUANTIZE(model, tmp_path / "int8", "compressed-tensors")
    rewards = {
        **WHOLE_PROMPTS,
        "hf_overrides": {"architectures": ["Qwen2ForProcessRewardModel"]},
        "pooler_config": {"step_tag_id": 7},
    }
    with (
        pytest.raises(PrepError, match="is to be quantised, but no file gives it a weight_scale"),
        engine_of("V1", tmp_path / "int8", **rewards),
    ):
        pass


@pytest.mark.parametrize("runner", RUNNERS)
def test_scores_of_a_cross_encoder_with_token_types(folder, seed, runner):
    from transformers import AutoModelForSequenceClassification

    model = folder("Bert", "ForSequenceClassification", num_labels=1, num_key_value_heads=4)
    queries, documents = prompts_of(seed, [4, 9, 30, 1]), prompts_of(seed + 1, [60, 2, 8, 100])

    def text(tokens):
        return " ".join(f"t{token}" for token in tokens)

    with engine_of(runner, model, **WHOLE_PROMPTS) as llm:
        outputs = llm.score(
            [text(tokens) for tokens in queries],
            [text(tokens) for tokens in documents],
            use_tqdm=False,
        )
        # In one batch with a prompt that has no types
        pair = [0, *queries[0], 1, *documents[0], 1]
        first = len(queries[0]) + 2  # of the tokens of type 1; vLLM 0.33.0 wants their end, too
        types = (first, len(pair)) if is_since("0.33.0") else first
        mixed = [PoolingParams(extra_kwargs={"compressed_token_type_ids": types}), PoolingParams()]
        got = pooled(llm, [pair, pair], "classify", mixed)
    hf = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    expected = []
    with torch.no_grad():
        for query, document in zip(queries, documents):
            ids = torch.tensor([[0, *query, 1, *document, 1]])
            types = (torch.arange(ids.shape[1]) >= len(query) + 2).long()[None]
            expected.append(hf(ids, token_type_ids=types).logits[0].sigmoid())
        untyped = hf(torch.tensor([pair])).logits[0].sigmoid()
    check_close([torch.tensor([output.outputs.score]) for output in outputs], expected)
    check_close(got, [expected[0], untyped])


@pytest.mark.parametrize("runner", RUNNERS)
def test_windows_of_an_encoder_reach_both_ways(folder, seed, runner):
    model = folder(
        "ModernBert",
        "Model",
        num_hidden_layers=3,
        num_key_value_heads=4,
        local_attention=16,
        global_attn_every_n_layers=3,
        spread=0.5,
    )
    prompts = prompts_of(seed, LENGTHS)
    with engine_of(runner, model, **WHOLE_PROMPTS) as llm:
        got = pooled(llm, prompts, "embed")
        windows = [builder.sliding_window for _, builder, _ in runner_of(llm).preparer.builders]
    check_close(got, [normalized(rows[0]) for rows in hidden_states(model, prompts)])
    assert windows == [None, 9]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_decoder_that_attends_both_ways(folder, seed, runner):
    model = folder("Qwen2")
    prompts = prompts_of(seed, LENGTHS)
    config = {"hf_overrides": {"is_causal": False}, "pooler_config": {"seq_pooling_type": "MEAN"}}
    with engine_of(runner, model, **WHOLE_PROMPTS, **config) as llm:
        got = pooled(llm, prompts, "embed")
    states = hidden_states(model, prompts, both_ways=True)
    check_close(got, [normalized(rows.mean(0)) for rows in states])
    assert (hidden_states(model, prompts)[2] - states[2]).abs().max() > 0.1
