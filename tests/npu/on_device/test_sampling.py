"""Sampling and prompt embeddings on the device, within half precision of transformers' logits."""

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.engine.test_sampling import GREEDY
from tests.helpers import huggingface
from tests.helpers.engine import engine, greedy, make_model
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import engine_of

TOLERANCE = 0.1
"""Logits of float16 against float32, in nats."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), eos_token_id=7, spread=0.1)


@pytest.fixture(scope="module")
def hf(model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def logits_of(model):
    return huggingface.logits_of(model)


@pytest.fixture(scope="module")
def llm(model):
    with engine(
        model,
        dtype="float16",
        block_size=128,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=64 << 20,
        enable_prompt_embeds=True,
    ) as llm:
        yield llm


def run(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def ids(prompts):
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def test_processors_choose_what_transformers_would(llm, logits_of, seed):
    prompts = prompts_of(seed, [9, 90, 17, 5, 23])
    params = [
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False, **given)
        for given, _ in GREEDY.values()
    ]
    for name, prompt, output in zip(GREEDY, prompts, run(llm, ids(prompts), params)):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) >= 6
        for count, token in enumerate(tokens):
            logits = logits_of(prompt + tokens[:count])[-1]
            logits = GREEDY[name][1](logits, prompt, tokens[:count])
            assert logits[token] >= logits.max() - TOLERANCE, (name, count)


def test_random_samples_stay_among_the_likeliest(llm, logits_of, seed):
    prompts = prompts_of(seed, [12, 70, 3])
    given = {"temperature": 0.8, "top_k": 6, "top_p": 0.95, "min_p": 0.02, "logprobs": 3}
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False, seed=each, **given)
        for each in (1, None, 2)
    ]
    first, again = (run(llm, ids(prompts), params) for _ in range(2))
    for row in (0, 2):
        assert first[row].outputs[0].token_ids == again[row].outputs[0].token_ids, "seeded"
    chosen = set()
    for prompt, output in zip(prompts, first):
        tokens = list(output.outputs[0].token_ids)
        logits = logits_of(prompt + tokens)[len(prompt) - 1 : -1]
        log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        for row, scores, token, entries in zip(
            logits, log_probabilities, tokens, output.outputs[0].logprobs
        ):
            assert row[token] >= np.sort(row)[-6] - TOLERANCE
            chosen.add(int((row > row[token]).sum()))
            for each, entry in entries.items():
                assert entry.logprob == pytest.approx(scores[each], abs=TOLERANCE)
    assert len(chosen) > 1, "only the likeliest was ever chosen"


def test_embeddings_give_the_tokens_that_their_ids_give(llm, hf, seed):
    prompts = prompts_of(seed, [5, 90, 33, 70])
    rows = hf.get_input_embeddings().weight.detach()
    embeds = [{"prompt_embeds": rows[prompt].half()} for prompt in prompts]
    expected = [output.outputs[0].token_ids for output in run(llm, ids(prompts), greedy(10))]
    mixed = [*ids(prompts)[:2], *embeds[2:]]
    for given in (embeds, mixed):
        got = [output.outputs[0].token_ids for output in run(llm, given, greedy(10))]
        assert got == expected


def test_prompts_are_scored_by_v2(model, logits_of, seed):
    """In chunks: the likeliest tokens of each place, and those that the request names."""
    prompts = prompts_of(seed, [9, 90, 17])
    params = [greedy(2, prompt_logprobs=2) for _ in prompts]
    named = [[[(each + 1) % 512, 5] for each in prompt[1:]] for prompt in prompts]
    for each, tokens in zip(params[1:], named[1:]):
        each.prompt_logprob_token_ids = tokens
    settings = {"block_size": 128, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 64 << 20}
    with engine_of("V2", model, dtype="float16", **settings) as llm:
        outputs = run(llm, ids(prompts), params)
    assert outputs[0].prompt_token_id_logprobs is None
    for prompt, tokens, output in zip(prompts, named, outputs):
        logits = torch.from_numpy(logits_of(prompt)[:-1])
        scores = logits.log_softmax(-1).numpy()
        for row, entries in zip(scores, output.prompt_logprobs[1:], strict=True):
            for each, entry in entries.items():
                assert entry.logprob == pytest.approx(row[each], abs=TOLERANCE)
        if output.prompt_token_id_logprobs is not None:
            expected = np.take_along_axis(scores, np.array(tokens), 1)
            np.testing.assert_allclose(output.prompt_token_id_logprobs, expected, atol=TOLERANCE)
