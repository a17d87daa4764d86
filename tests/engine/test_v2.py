"""vLLM's Model Runner V2 with this plugin: V1's tokens, from the same traffic."""

import json
from collections import defaultdict
from typing import ClassVar

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from tests.helpers.drafters import make_eagle_head
from tests.helpers.engine import generate, greedy, make_model, runner_of
from tests.helpers.huggingface import logits_of, reference
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.watch import count_preemptions, count_verified
from vllm_npu_prep.inspect.explain import explain_json
from vllm_npu_prep.inspect.replay import replay
from vllm_npu_prep.inspect.view import view_of_record
from vllm_npu_prep.records.step_samples import SUFFIX

CHECKED = {"additional_config": {"npu_prep": {"check": "full"}}}
FEW_BLOCKS = {"kv_cache_memory_bytes": 2 * 2 * 16 * 4 * 2 * 128 * 6}
"""Room for 6 blocks of 128 tokens: requests are preempted."""
PARAMS = {
    "plain": {},
    "log-probabilities": {"logprobs": 3},
    "of prompts": {"prompt_logprobs": 2, "logprobs": 0},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {5: 30.0, 7: -5.0}, "min_tokens": 10, "stop_token_ids": [5]},
    "allowed": {"allowed_token_ids": list(range(40, 90))},
}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """A model, and how it drafts."""
    folder = tmp_path_factory.mktemp("drafting")
    model = make_model(folder / "model", spread=0.1, embedding_scale=20)
    head = make_eagle_head(folder / "head", model)
    return model, {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(1)
    lengths = (5, 115, 17, 130, 63, 8)
    return [rng.integers(2, 512, length).tolist() for length in lengths]


def answers(llm, prompts, **params):
    """All that requests get: tokens, and log-probabilities with their ranks, of samples and then of
    prompts."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    params, words = dict(params), params.get("bad_words_of")
    params.pop("bad_words_of", None)
    sampling = greedy(20, **params)
    sampling._bad_words_token_ids = words
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    return [
        (
            list(each.outputs[0].token_ids),
            [{t: v.rank for t, v in at.items()} for at in places if at],
            [v.logprob for at in places if at for v in at.values()],
        )
        for each in outputs
        for places in ([*(each.outputs[0].logprobs or ()), *(each.prompt_logprobs or ())],)
    ]


def assert_same(given, expected, name):
    """Tokens and ranks are equal, log-probabilities but for rounding."""
    for mine, other in zip(given, expected, strict=True):
        assert mine[:2] == other[:2], name
        np.testing.assert_allclose(mine[2], other[2], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_v2_gives_v1s_answers_while_requests_are_preempted(qwen3, prompts, async_scheduling):
    found = {}
    for runner in RUNNERS:
        settings = {**CHECKED, **FEW_BLOCKS, "async_scheduling": async_scheduling}
        with engine_of(runner, qwen3, **settings) as llm:
            preempted = count_preemptions(llm)
            found[runner] = {
                name: answers(llm, prompts, **params) for name, params in PARAMS.items()
            }
        assert preempted["preempted"] > 0
    v1, v2 = found["V1"], found["V2"]
    for name, expected in v1.items():
        assert_same(v2[name], expected, name)
    assert len({str(v1[name]) for name in PARAMS}) == len(PARAMS)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_tokens_that_a_request_names_are_scored(qwen3, prompts, async_scheduling):
    """Along its prompt, from the start or further on, in chunks, beside requests that name none.
    vLLM takes `prompt_logprob_token_ids` on V2 alone."""
    rng, compute = np.random.default_rng(5), logits_of(qwen3)
    inputs, params, expected = [], [], []
    for index, prompt in enumerate(prompts):
        start = len(prompt) // 3 if index % 2 else 0
        rows = [
            rng.integers(0, 512, 1 + place % 3).tolist() for place in range(len(prompt) - 1 - start)
        ]
        named = {"prompt_logprob_token_ids": rows, "prompt_logprob_start": start or None}
        named = named if index % 4 != 2 else {}
        inputs.append({"prompt_token_ids": prompt})
        params.append(SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **named))
        logits = torch.from_numpy(compute(prompt)[start:-1])
        logprobs, width = logits.log_softmax(-1).numpy(), max(map(len, rows))
        of_rows = [
            logprobs[place, row].tolist() + [-np.inf] * (width - len(row))
            for place, row in enumerate(rows)
        ]
        expected.append(of_rows if named else None)
    settings = {"max_num_batched_tokens": 48, "async_scheduling": async_scheduling}
    with engine_of("V2", qwen3, **CHECKED, **FEW_BLOCKS, **settings) as llm:
        outputs = llm.generate(inputs, params, use_tqdm=False)
    for output, scores in zip(outputs, expected, strict=True):
        if scores is None:
            assert output.prompt_token_id_logprobs is None
        else:
            np.testing.assert_allclose(output.prompt_token_id_logprobs, scores, atol=1e-4)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_drafts_change_nothing_that_a_request_gets(drafting, prompts, async_scheduling):
    """Log-probabilities, penalties, allowed and forbidden words: V1's without drafts, while drafts
    are accepted and rejected and requests are preempted. vLLM takes no bias beside drafts."""
    (model, drafts), verified = drafting, {}
    with engine_of("V1", model) as llm:
        plain = generate(llm, prompts, greedy(40))
        words = {"bad_words_of": [answer[3:5] for answer in plain] + [plain[0][9:10]]}
        params = PARAMS | {"words": words}
        del params["bias"]
        expected = {name: answers(llm, prompts, **each) for name, each in params.items()}
    blocks = {"kv_cache_memory_bytes": FEW_BLOCKS["kv_cache_memory_bytes"] * 3 // 2}  # the head's
    settings = CHECKED | blocks | {"async_scheduling": async_scheduling}
    with engine_of("V2", model, speculative_config=drafts, **settings) as llm:
        preempted = count_preemptions(llm)
        for name, each in params.items():
            verified[name] = count_verified(llm)
            assert_same(answers(llm, prompts, **each), expected[name], name)
    assert preempted["preempted"] > 0
    for name, counts in verified.items():
        assert counts["rejected"] > 0, name
        assert name == "allowed" or counts["accepted"] + counts["partly"] > 0, name
    assert len({str(each) for each in expected.values()}) == len(params)


def test_drafts_by_chance_leave_greed_and_seeds_alone(drafting, prompts):
    """Greedy requests beside random ones, in chunks and preempted; random ones with a seed, alone
    and with others that leave them their drafts. Log-probabilities are of the tokens taken."""
    model, drafts = drafting
    drafts = drafts | {"draft_sample_method": "probabilistic"}
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]

    def random(**params):
        return SamplingParams(temperature=0.9, ignore_eos=True, detokenize=False, **params)

    mixed = [random(max_tokens=40) if n % 2 else greedy(40) for n in range(len(prompts))]
    blocks = {"kv_cache_memory_bytes": FEW_BLOCKS["kv_cache_memory_bytes"] * 3 // 2}  # the head's
    with engine_of("V2", model, speculative_config=drafts, **CHECKED, **blocks) as llm:
        verified, preempted = count_verified(llm), count_preemptions(llm)
        found = llm.generate(inputs, mixed, use_tqdm=False)
        assert preempted.pop("preempted") > 0
        seeded = [random(max_tokens=20, seed=n, logprobs=2, top_k=20) for n in range(3)]
        together = llm.generate(inputs[::2], seeded, use_tqdm=False)
        alone = [
            llm.generate([each], params, use_tqdm=False)[0]
            for each, params in zip(inputs[::2], seeded)
        ]
        assert not preempted
    tokens, given, again = (
        [list(each.outputs[0].token_ids) for each in outputs]
        for outputs in (found, together, alone)
    )
    assert tokens[::2] == reference(model, prompts[::2], 40)
    assert tokens[1::2] != reference(model, prompts[1::2], 40)
    assert given == again
    for each in together:
        for token, ranked in zip(each.outputs[0].token_ids, each.outputs[0].logprobs, strict=True):
            assert ranked[token].rank <= 20
    assert min(verified[what] for what in ("accepted", "partly", "rejected")) > 0


class Watching(LogitsProcessor):
    """A processor of a user's, which notes what it may read of requests."""

    seen: ClassVar[list[tuple]] = []
    writes = 0

    def __init__(self, vllm_config, req_states):
        self.states = req_states

    def add_request(self, req_idx, sampling_params):
        return True

    def apply_staged_writes(self):
        type(self).writes += 1

    def apply(self, logits, context):
        for slot, length in zip(context.expanded_idx_mapping.tolist(), context.pos.tolist()):
            kept = int(self.states.total_len.gpu[slot])
            tokens = self.states.all_token_ids.gpu[slot, :kept].tolist()
            self.seen.append((slot, length + 1, tokens))
        return logits


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_a_users_logits_processor_reads_tokens_of_requests(qwen3, async_scheduling):
    own = {"logits_processors": [Watching], "async_scheduling": async_scheduling}
    with engine_of("V2", qwen3, max_num_seqs=1, **own) as llm:
        for prompt in ([3, 4, 5, 6], [7, 8]):  # the second one takes the first one's slot
            Watching.seen.clear()
            Watching.writes = 0
            (answer,) = generate(llm, [prompt], greedy(4))
            tokens = prompt + answer
            kept = {length: seen for _, length, seen in Watching.seen if seen}
            assert Watching.writes >= 4, "once in each step"
            for length in range(len(prompt), len(tokens)):
                assert kept[length] == tokens[:length]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("runner_name", RUNNERS)
def test_logits_that_are_no_numbers_end_the_step_when_asked_to(
    qwen3, monkeypatch, runner_name, async_scheduling
):
    monkeypatch.setenv("VLLM_RAISE_ON_LOGIT_NANS", "1")
    with engine_of(runner_name, qwen3, async_scheduling=async_scheduling) as llm:
        of_llm = runner_of(llm).get_model()
        compute = of_llm.compute_logits

        def spoilt(hidden_states, *args, **kwargs):
            logits = compute(hidden_states, *args, **kwargs)
            logits[0, 3] = torch.nan
            return logits

        monkeypatch.setattr(of_llm, "compute_logits", spoilt)
        with pytest.raises(RuntimeError, match="NaNs detected in logits"):
            generate(llm, [[3, 4, 5, 6]], greedy(3))


@pytest.mark.parametrize("case", ["sync", "async", "drafts"])
def test_traces_are_followed_and_tokens_come_with_their_rivals(drafting, prompts, case, tmp_path):
    """A trace takes the place of samples in every other request; masks are of the model's logits.

    vLLM has both on V2 alone, and takes no traces beside drafts. Records have both, too.
    """
    (model, drafts), compute, rng = drafting, logits_of(drafting[0]), np.random.default_rng(3)
    traces = {index: rng.integers(2, 512, 9).tolist() for index in range(0, len(prompts), 2)}
    traces = {} if case == "drafts" else traces
    params = [
        SamplingParams(seed=5, temperature=0.5, top_k=5, max_tokens=20, ignore_eos=True)
        for _ in prompts
    ]
    for index, trace in traces.items():
        params[index].trace_decode_token_ids = trace
    settings = {"logprobs_mode": "processed_logprobs", "return_sampling_mask": True}
    settings |= {"enable_trace_replay": bool(traces), "async_scheduling": case != "sync"}
    rows = {"max_num_seqs": 2}  # which later requests take over
    settings |= {"speculative_config": drafts} if case == "drafts" else rows
    record = {"dir": str(tmp_path), "steps": "0:1000", "request_ids": "plain"}
    settings["additional_config"] = {"npu_prep": {"check": "full", "record": record}}
    with engine_of("V2", model, max_num_batched_tokens=48, **settings) as llm:
        verified = count_verified(llm) if case == "drafts" else {"partly": 1, "rejected": 1}
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        (answer,) = output.outputs
        tokens = list(answer.token_ids)
        assert len(tokens) == (9 if index in traces else 20)
        assert tokens == traces.get(index, tokens)
        logits = compute(prompt + tokens)[len(prompt) - 1 : -1]
        best = [sorted(row.argsort()[-5:].tolist()) for row in logits]
        assert answer.sampling_mask.token_ids == best
        assert index in traces or all(token in row for token, row in zip(tokens, best))
    assert verified["partly"] > 0 and verified["rejected"] > 0
    check_sampled(tmp_path, outputs, traces)


def check_sampled(folder, outputs, traces):
    """Records have the tokens of each request in the order of its steps, where each came from, and
    its rivals; replays agree, and find one that can't have been drawn."""
    recorded = defaultdict(list)
    files = sorted(folder.glob("*/*.npz"))
    for file in files:
        view = view_of_record(file)
        assert explain_json(view)["samples"] == [e.model_dump() for e in view.samples]
        for request, samples in zip(view.requests, view.samples, strict=True):
            rivals = [
                [t for first, n in runs for t in range(first, first + n)] for runs in samples.kept
            ]
            sources = [samples.from_trace] * len(rivals)
            recorded[int(request.req_id.partition("-")[0])] += zip(
                samples.token_ids, rivals, sources
            )
    first = int(outputs[0].request_id)
    for index, output in enumerate(outputs):
        tokens, rivals, sources = zip(*recorded[first + index])
        (answer,) = output.outputs
        length = len(answer.token_ids)  # what is behind it was sampled, and left out
        assert list(tokens[:length]) == list(answer.token_ids)
        assert list(rivals[:length]) == answer.sampling_mask.token_ids
        assert set(sources[:length]) == {index in traces}
    assert all(not found for _, found in replay(folder))
    last = files[-1].with_suffix(SUFFIX)
    samples = json.loads(last.read_text())
    drawn = next(each for each in samples if each["token_ids"] and not each["from_trace"])
    drawn["token_ids"][0] = next(t for t in range(512) if [t, 1] not in drawn["kept"][0])
    last.write_text(json.dumps(samples))
    ((found,),) = [each for _, each in replay(folder) if each]
    assert "the mask says one of 5 others" in str(found)
