"""Sampling: what each parameter does, by transformers' logits and formulas written down here."""

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from examples.tiny_model import make_tokenizer
from tests.helpers import huggingface
from tests.helpers.engine import make_model
from tests.helpers.prompts import VOCAB, prompts_of
from tests.helpers.statistics import follows
from tests.helpers.v2 import ALSO_V2, engine_of

SAMPLES = 2000
EOS = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("qwen3"), eos_token_id=EOS, spread=0.1)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def logits_of(model):
    return huggingface.logits_of(model)


@pytest.fixture(scope="module", params=ALSO_V2)
def llm(model, request):
    with engine_of(
        request.param,
        model,
        skip_tokenizer_init=False,
        max_logprobs=VOCAB,
        max_num_seqs=256,
        max_num_batched_tokens=256,
    ) as llm:
        yield llm


def run(llm, prompts, params):
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def tokens_of(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_samples_follow_the_distribution(llm, logits_of, seed):
    """Of tokens that are among the likeliest ones, and hold most of what these have together."""
    (prompt,) = prompts_of(seed, [20])
    logits = logits_of(prompt)[-1] / 1.4
    likeliest = np.argsort(-logits)[:30]
    chances = np.exp(logits[likeliest]) / np.exp(logits[likeliest]).sum()
    kept = np.cumsum(chances) - chances < 0.8
    expected = np.zeros(VOCAB)
    expected[likeliest[kept]] = chances[kept] / chances[kept].sum()
    torch.manual_seed(seed)
    sampling = SamplingParams(
        n=SAMPLES, max_tokens=1, detokenize=False, temperature=1.4, top_k=30, top_p=0.8
    )
    (output,) = run(llm, [prompt], sampling)
    counts = np.bincount([each.token_ids[0] for each in output.outputs], minlength=VOCAB)
    assert counts.sum() == SAMPLES
    assert follows(counts, expected)


def test_log_probabilities_of_the_whole_vocabulary(llm, logits_of, seed):
    (prompt,) = prompts_of(seed, [20])
    asked = SamplingParams(max_tokens=1, temperature=0, logprobs=VOCAB, detokenize=False)
    (found,) = run(llm, [prompt], asked)[0].outputs[0].logprobs
    logits = logits_of(prompt)[-1]
    expected = logits - np.log(np.exp(logits).sum())
    given = np.array([found[token].logprob for token in range(VOCAB)])
    np.testing.assert_allclose(given, expected, atol=1e-4)


def decode(logits_of, prompt, length, process) -> list[int]:
    """Greedy tokens whose logits went through `process(logits, prompt, outputs)`."""
    outputs: list[int] = []
    for _ in range(length):
        logits = process(logits_of(prompt + outputs)[-1].copy(), prompt, outputs)
        outputs.append(int(np.argmax(logits)))
    return outputs


def repetition(logits, prompt, outputs):
    seen = sorted({*prompt, *outputs})
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.4, logits[seen] * 1.4)
    return logits


def presence_and_frequency(logits, prompt, outputs):
    counts = np.bincount(outputs, minlength=VOCAB)
    return logits - 0.6 * counts - 0.9 * (counts > 0)


def not_the_end_yet(logits, prompt, outputs):
    if len(outputs) < 6:
        logits[[EOS, 11, *range(100, 210)]] = -np.inf
    return logits


def biased(logits, prompt, outputs):
    logits[[33, 44]] += 1.5, -50.0
    return logits


GREEDY = {
    "repetition penalty": ({"repetition_penalty": 1.4}, repetition),
    "presence and frequency penalties": (
        {"presence_penalty": 0.9, "frequency_penalty": 0.6},
        presence_and_frequency,
    ),
    "min tokens": ({"min_tokens": 6, "stop_token_ids": [11, *range(100, 210)]}, not_the_end_yet),
    "bias": ({"logit_bias": {33: 1.5, 44: -50.0}}, biased),
    "plain": ({}, lambda logits, prompt, outputs: logits),
}


def test_processors_of_one_batch_leave_each_other_alone(llm, logits_of, seed):
    """Greedy tokens of requests with different processors, in one batch."""
    prompts = prompts_of(seed, [9, 40, 17, 5, 23])
    params = [
        SamplingParams(temperature=0, max_tokens=12, detokenize=False, **given)
        for given, _ in GREEDY.values()
    ]
    got = tokens_of(run(llm, prompts, params))
    for name, prompt, ours in zip(GREEDY, prompts, got):
        expected = decode(logits_of, prompt, 12, GREEDY[name][1])
        ends = [EOS] + ([11, *range(100, 210)] if name == "min tokens" else [])
        first = next((i for i, token in enumerate(expected) if token in ends), 11)
        assert ours == expected[: first + 1], name


def test_lists_may_be_longer_than_rows_of_upstream_s_v2(model, seed, llm):
    """There they would end the engine. The next requests, in the same rows, have short ones."""
    prompts = prompts_of(seed, [9, 20, 30])
    long = {"stop_token_ids": [*range(2, 400)], "min_tokens": 3}, {"allowed_token_ids": [5] * 1025}
    asked = [
        SamplingParams(temperature=0, max_tokens=4, detokenize=False, **given)
        for given in (*long, {"ignore_eos": True}, {"ignore_eos": True, "logit_bias": {3: -99.0}})
    ]
    late, allowed, plain = tokens_of(run(llm, prompts, asked[:3]))
    assert len(late) >= 3 and not {*late[:3]} & {EOS, *range(2, 400)}
    assert allowed == [5] * 4
    expected = huggingface.reference(model, prompts, 4)
    assert plain == expected[2]
    assert tokens_of(run(llm, prompts, asked[3])) == expected


def test_a_seed_gives_the_same_tokens_in_any_company(llm, seed):
    prompts = prompts_of(seed, [30, 240, 60])
    seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
    other = SamplingParams(temperature=1.0, seed=6, max_tokens=16, ignore_eos=True)
    free = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    alone = tokens_of(run(llm, prompts[:1], seeded))[0]
    first, *_ = tokens_of(run(llm, prompts, [seeded, free, other]))
    # In a second chunk, before which its generator must not have advanced
    _, cut, _ = tokens_of(run(llm, [prompts[1], prompts[0], prompts[2]], [free, seeded, other]))
    different = tokens_of(run(llm, prompts[:1], other))[0]
    assert first == cut == alone
    assert different != alone
    twice = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=16, ignore_eos=True)
    samples = [tuple(o.token_ids) for o in run(llm, prompts[:1], twice)[0].outputs]
    assert len(set(samples)) == 3, "samples of one request differ"
    again = [tuple(o.token_ids) for o in run(llm, prompts[:1], twice)[0].outputs]
    assert again == samples
