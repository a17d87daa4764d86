"""End to end through vLLM's engine: greedy tokens are those of Hugging Face transformers."""

import pytest
import torch
from vllm import SamplingParams

from tests.helpers.engine import generate, greedy, make_model
from tests.helpers.huggingface import check_varied, reference
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import ALSO_V2, engine_of
from tests.helpers.watch import count_preemptions, count_states, count_verified
from vllm_npu_prep.attention.mask_cache import MaskCache


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), "Qwen3")


@pytest.mark.parametrize("runner_name", ALSO_V2)
@pytest.mark.parametrize("mask", ["dense", "compressed"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("block_size", [7, 128])
def test_short_and_long_prompts_with_a_budget_below_a_prompt(
    model, seed, mask, asynchronous, block_size, runner_name
):
    prompts = prompts_of(seed, [3, 1, 150, 40, 90, 17, 2, 64, 65, 33])
    with engine_of(
        runner_name,
        model,
        block_size=block_size,
        async_scheduling=asynchronous,
        additional_config={"npu_prep": {"mask": mask}},
        max_num_batched_tokens=48,
    ) as llm:
        states = count_states(llm)
        got = generate(llm, prompts, greedy(24))
    expected = reference(model, prompts, 24)
    assert got == expected
    check_varied(expected)
    print(dict(states))
    assert {"PrefillNoCache", "ChunkedPrefill", "DecodeOnly"} <= set(states)


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_one_engine_passes_through_every_state(model, seed, runner_name):
    """Chunked prefill off, prefix caching on, ngram drafts: all five states in one run."""
    shared = prompts_of(seed, [48])[0]
    tails = prompts_of(seed + 1, [5, 9, 12])
    loops = [p * 6 for p in prompts_of(seed + 2, [4, 3])]  # repeats, for ngram to find
    prompts = [shared + tails[0], *(shared + tail for tail in tails), *loops]
    with engine_of(
        runner_name,
        model,
        block_size=16,
        enable_chunked_prefill=False,
        enable_prefix_caching=True,
        max_num_batched_tokens=256,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 2,
        },
        max_num_seqs=2,
    ) as llm:
        states = count_states(llm)
        got = generate(llm, prompts[:1], greedy(8))
        got += generate(llm, prompts[1:4], greedy(40))
        got += generate(llm, prompts[4:], greedy(40))
        got += generate(llm, prompts, greedy(16))
    expected = reference(model, prompts[:1], 8)
    expected += reference(model, prompts[1:], 40)
    expected += reference(model, prompts, 16)
    assert got == expected
    print(dict(states))
    without_drafts = {"DecodeOnly"} if runner_name == "V1" else set()  # V2's ngram always drafts
    assert set(states) == without_drafts | {
        "PrefillNoCache",
        "PrefillCacheHit",
        "ChunkedPrefill",
        "SpecDecoding",
    }


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_ngram_drafts_are_accepted_and_rejected_without_changing_tokens(
    tmp_path_factory, seed, runner_name
):
    """A model that falls into loops, so that drafts are right often and wrong sometimes."""
    model = make_model(tmp_path_factory.mktemp("loops"), spread=0.1)
    prompts = prompts_of(seed, [20, 9, 30])
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with engine_of(runner_name, model, speculative_config=ngram) as llm:
        verified = count_verified(llm)
        got = generate(llm, prompts, greedy(60))
    print(dict(verified))
    assert got == reference(model, prompts, 60)
    assert verified["accepted"] > 0
    assert verified["partly"] + verified["rejected"] > 0


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_preempted_requests_come_back_with_the_same_tokens(model, seed, runner_name):
    prompts = prompts_of(seed, [30, 28, 25, 31, 22, 29])
    with engine_of(
        runner_name, model, block_size=4, num_gpu_blocks_override=40, max_model_len=96
    ) as llm:
        count = count_preemptions(llm)
        got = generate(llm, prompts, greedy(40))
    assert count["preempted"] > 0
    assert got == reference(model, prompts, 40)


@pytest.mark.parametrize("runner_name", ALSO_V2)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Mistral", {"sliding_window": 13}),
        (
            "Gemma2",
            {
                "sliding_window": 13,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 8.0,
                "query_pre_attn_scalar": 16,
                "tie_word_embeddings": True,
                "embedding_scale": 0.02,
            },
        ),
        ("Llama", {}),
    ],
)
@pytest.mark.parametrize("mask", ["dense", "compressed"])
def test_windows_and_soft_caps(tmp_path_factory, seed, family, settings, mask, runner_name):
    folder = make_model(tmp_path_factory.mktemp(family), family, **settings)
    prompts = prompts_of(seed, [5, 70, 30, 12, 14])
    with engine_of(
        runner_name,
        folder,
        max_num_batched_tokens=32,
        block_size=16,
        additional_config={"npu_prep": {"mask": mask}},
    ) as llm:
        got = generate(llm, prompts, greedy(24))
    expected = reference(folder, prompts, 24)
    assert got == expected
    check_varied(expected)


BF16_TOLERANCE = 0.15
"""Largest difference of a log-probability from transformers' in bfloat16, in nats: the two run the
same sums in another order, with eight bits of mantissa."""


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_bf16_log_probabilities_stay_within_tolerance(model, seed, runner_name):
    from transformers import AutoModelForCausalLM

    prompts = prompts_of(seed, [5, 60, 33, 90])
    with engine_of(runner_name, model, dtype="bfloat16", max_num_batched_tokens=48) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in prompts],
            greedy(1, prompt_logprobs=0),
            use_tqdm=False,
        )
    got = torch.tensor(
        [
            output.prompt_logprobs[position][prompt[position]].logprob
            for prompt, output in zip(prompts, outputs)
            for position in range(1, len(prompt))
        ]
    )

    def log_probabilities(dtype):
        hf = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        rows = []
        for prompt in prompts:
            with torch.no_grad():
                logits = hf(torch.tensor([prompt])).logits[0, :-1].float()
            rows.append(logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
        return torch.cat(rows)

    theirs, exact = log_probabilities(torch.bfloat16), log_probabilities(torch.float32)
    print("from transformers", (got - theirs).abs().max(), "from fp32", (got - exact).abs().max())
    assert (got - theirs).abs().max() < BF16_TOLERANCE
    # No further from the truth than transformers is.
    assert (got - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("runner_name", ALSO_V2)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_seeded_request_draws_the_same_tokens_however_its_prompt_is_cut(
    model, seed, asynchronous, runner_name
):
    """A chunk's sample is thrown away, and its generator must not have advanced."""
    prompts = prompts_of(seed, [60, 5, 33])
    params = SamplingParams(
        temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, detokenize=False
    )
    drawn = []
    for budget in (16, 256):
        with engine_of(
            runner_name, model, max_num_batched_tokens=budget, async_scheduling=asynchronous
        ) as llm:
            drawn.append(generate(llm, prompts, params))
    assert drawn[0] == drawn[1]
    check_varied(drawn[0])


@pytest.mark.parametrize("runner_name", ALSO_V2)
@pytest.mark.parametrize("mask", ["dense", "compressed"])
def test_a_wrong_mask_gives_wrong_tokens(model, seed, mask, monkeypatch, runner_name):
    """The mask in the metadata is the mask that attention applies."""
    maker = "build" if mask == "dense" else "constant"
    make = getattr(MaskCache, maker)

    def planted(*args):
        made = make(*args)
        return None if made is None else torch.zeros_like(made)

    monkeypatch.setattr(MaskCache, maker, planted)
    prompts = prompts_of(seed, [20, 33])
    with engine_of(runner_name, model, additional_config={"npu_prep": {"mask": mask}}) as llm:
        got = generate(llm, prompts, greedy(8))
    assert got != reference(model, prompts, 8)
