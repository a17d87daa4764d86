"""Prompts given as embeddings: the same tokens as the prompt's token ids give."""

import pytest
import torch
from safetensors.torch import load_file
from vllm.exceptions import VLLMValidationError

from tests.helpers.engine import graphs, greedy, runner_of
from tests.helpers.huggingface import reference
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import RUNNERS, engine_of, on_both
from tests.helpers.watch import count_preemptions
from vllm_npu_prep.runner.prompt_embeds import refuse_non_finite

GRAPHS = {"eager": {}, "graphs": graphs("FULL_AND_PIECEWISE", 4, 16)}


@pytest.fixture(scope="module")
def embedding(qwen3):
    return load_file(qwen3 / "model.safetensors")["model.embed_tokens.weight"]


def run(llm, prompts, params=None):
    outputs = llm.generate(prompts, params or greedy(12), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("mode", "asynchronous", "runner"),
    on_both({"eager": ("eager", False), "graphs": ("graphs", True)}),
)
def test_embeddings_give_the_tokens_that_their_ids_give(
    qwen3, embedding, seed, mode, asynchronous, runner
):
    """In chunks, beside token ids, preempted, cached, and with ids that stale rows hold.

    Steps that read embeddings run eagerly on V1; on V2 all steps read embeddings, in graphs, too.
    """
    ids = prompts_of(seed, [5, 90, 33, 1, 70, 20, 64, 41])
    as_ids = [{"prompt_token_ids": prompt} for prompt in ids]
    as_embeds = [{"prompt_embeds": embedding[prompt]} for prompt in ids]
    mixed = [pair[row % 2] for row, pair in enumerate(zip(as_ids, as_embeds))]
    settings = {
        "max_num_batched_tokens": 48,
        "block_size": 16,
        "num_gpu_blocks_override": 12,
        "max_model_len": 128,
        "async_scheduling": asynchronous,
        "enable_prompt_embeds": True,
        "additional_config": {"npu_prep": {"check": "full"}},
        **GRAPHS[mode],
    }
    with engine_of(runner, qwen3, **settings) as llm:
        expected, preempted = run(llm, as_ids), count_preemptions(llm)
        assert expected == reference(qwen3, ids, 12)
        counts = runner_of(llm).padding.counts.by_kind
        without = counts.total()
        assert mode == "eager" or not any("embeddings" in kind for kind in counts)
        for prompts in (mixed, as_embeds, mixed):
            assert run(llm, prompts) == expected
        assert run(llm, as_embeds[3:4]) == expected[3:4]  # one token: it looks like a decode
        kinds = dict(counts)
    assert preempted["preempted"] > 0
    assert len({token for row in expected for token in row}) > 20
    if mode == "graphs":
        took_embeds = kinds.get("eager: embeddings, which graphs don't read", 0)
        assert (took_embeds > 0) == (runner == "V1")
        assert took_embeds < sum(kinds.values()) - without, "decodes replay graphs"
        assert kinds["full graph"] > 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_prompt_of_ids_and_embeddings(qwen3, embedding, seed, runner):
    """As chat messages with embedded parts are: some positions have ids, the others vectors.

    One with a vector that isn't finite is refused, and those after it are served.
    """
    (ids,) = prompts_of(seed, [70])
    is_token_ids = torch.arange(70) % 7 < 3
    vectors = torch.where(is_token_ids[:, None], torch.zeros(()), embedding[ids])
    known = torch.where(is_token_ids, torch.tensor(ids), 2**31 - 1).tolist()
    mixed = {
        "prompt_token_ids": known,
        "prompt_embeds": vectors,
        "prompt_is_token_ids": is_token_ids.tolist(),
    }
    settings = {"block_size": 16, "max_num_batched_tokens": 32, "enable_prefix_caching": True}
    with engine_of(runner, qwen3, enable_prompt_embeds=True, **settings) as llm:
        expected = run(llm, [{"prompt_token_ids": ids}])
        for value in (torch.nan, -torch.inf):
            bad = vectors.clone()
            bad[[41, 60], 3] = value
            with pytest.raises(VLLMValidationError, match="row 41 has NaN or an infinity"):
                run(llm, [{"prompt_embeds": vectors}, {**mixed, "prompt_embeds": bad}])
        assert run(llm, [mixed]) == expected
        answers = []
        for choose in (is_token_ids, torch.arange(70) % 5 < 2):  # the rest is the same
            rows = torch.where(choose[:, None], embedding[0], embedding[ids])
            answers.append(run(llm, [{"prompt_embeds": rows}]))
            chosen = {"prompt_token_ids": [0] * 70, "prompt_embeds": embedding[ids]}
            chosen["prompt_is_token_ids"] = choose.tolist()
            assert run(llm, [chosen]) == answers[-1]
        assert answers[0] != answers[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_prompts_have_to_be_finite_in_the_models_dtype(dtype):
    largest = torch.finfo(dtype).max
    refuse_non_finite(torch.full((70, 40), largest, dtype=dtype))  # a sum would overflow
    refuse_non_finite(torch.empty(0, 40, dtype=dtype))
    for value in (torch.nan, torch.inf, -torch.inf):
        embeds = torch.zeros(70, 40, dtype=dtype)
        embeds[69, 39] = value
        with pytest.raises(VLLMValidationError, match="row 69") as error:
            refuse_non_finite(embeds)
        assert error.value.parameter == "prompt_embeds"


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_prompt_that_is_unknown_has_no_log_probabilities(qwen3, embedding, seed, runner):
    """Those who ask get none, as from upstream; beside them, prompts of ids have theirs."""
    ids = prompts_of(seed, [40, 21])
    asks = greedy(12, prompt_logprobs=1)
    prompts = [{"prompt_embeds": embedding[ids[0]]}, {"prompt_token_ids": ids[1]}]
    with engine_of(runner, qwen3, enable_prompt_embeds=True, max_num_batched_tokens=32) as llm:
        expected = run(llm, prompts)
        embeds, tokens = llm.generate(prompts, asks, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in (embeds, tokens)] == expected
    assert not any(embeds.prompt_logprobs or ())
    assert len(tokens.prompt_logprobs) == 21
    assert all(token in row for token, row in zip(ids[1][1:], tokens.prompt_logprobs[1:]))


def test_penalties_count_no_prompt_that_is_unknown(qwen3, embedding, seed):
    """Rows keep what other requests had in them, placeholders of samples too; V2 gives V1's."""
    ids = prompts_of(seed, [30, 41, 9, 30])
    embeds = [{"prompt_embeds": embedding[prompt]} for prompt in ids]
    penalised = greedy(20, repetition_penalty=1.5)

    def answers(runner):
        with engine_of(runner, qwen3, enable_prompt_embeds=True, max_num_seqs=4) as llm:
            first, plain = run(llm, embeds, penalised), run(llm, embeds)
            run(llm, [{"prompt_token_ids": prompt} for prompt in prompts_of(seed + 1, [60] * 6)])
            assert run(llm, embeds, penalised) == first
            with_ids = run(llm, [{"prompt_token_ids": prompt} for prompt in ids], penalised)
        return first, plain, with_ids

    first, plain, with_ids = answers("V1")
    assert all(len(set(tokens)) >= 15 for tokens in first), "outputs are penalised"
    assert [tokens[:12] for tokens in first] != plain
    assert with_ids != first, "prompts are known"
    assert answers("V2") == (first, plain, with_ids)
