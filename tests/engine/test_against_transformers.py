"""End to end through vLLM's engine: greedy tokens are those of Hugging Face transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.engine import generate, greedy
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import ALSO_V2, engine_of, on_both
from tests.helpers.watch import count_preemptions, count_states
from vllm_npu_prep.attention.kernels.compiled_loops import loop_of


@pytest.mark.parametrize(
    ("mask", "settings", "runner_name"),
    on_both(
        {
            "async-dense": ("dense", {"block_size": 7, "num_gpu_blocks_override": 44}),
            "sync-compressed": ("compressed", {"async_scheduling": False}),
        }
    ),
)
def test_chunks_of_prompts_beside_decodes(qwen3, seed, mask, settings, runner_name):
    """Also of requests that are preempted, where blocks are few."""
    prompts = prompts_of(seed, [3, 1, 150, 40, 90, 17, 2, 64, 65, 33])
    with engine_of(
        runner_name,
        qwen3,
        additional_config={"npu_prep": {"mask": mask}},
        max_num_batched_tokens=48,
        **settings,
    ) as llm:
        states, preempted = count_states(llm), count_preemptions(llm)
        got = generate(llm, prompts, greedy(24))
    expected = reference(qwen3, prompts, 24)
    assert got == expected
    assert is_varied(expected)
    assert {"PrefillNoCache", "ChunkedPrefill", "DecodeOnly"} <= set(states)
    assert (preempted["preempted"] > 0) == ("num_gpu_blocks_override" in settings)


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_one_engine_passes_through_every_state(qwen3, seed, runner_name):
    """Chunked prefill off, prefix caching on, ngram drafts: all five states in one run."""
    shared = prompts_of(seed, [48])[0]
    tails = prompts_of(seed + 1, [5, 9, 12])
    loops = [p * 6 for p in prompts_of(seed + 2, [4, 3])]  # repeats, for ngram to find
    prompts = [shared + tails[0], *(shared + tail for tail in tails), *loops]
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    loop_of.cache_clear()
    with engine_of(
        runner_name,
        qwen3,
        block_size=16,
        enable_chunked_prefill=False,
        enable_prefix_caching=True,
        max_num_batched_tokens=256,
        speculative_config={**ngram, "prompt_lookup_max": 3, "prompt_lookup_min": 2},
        max_num_seqs=2,
    ) as llm:
        assert loop_of.cache_info().currsize == 1, "compiled before the first request"
        states = count_states(llm)
        got = generate(llm, prompts[:1], greedy(8))
        got += generate(llm, prompts[1:4], greedy(40))
        got += generate(llm, prompts[4:], greedy(40))
        got += generate(llm, prompts, greedy(16))
    expected = reference(qwen3, prompts, 40)
    cut = [8, *[40] * 5, *[16] * 6]
    assert got == [row[:count] for row, count in zip(expected * 2, cut, strict=True)]
    without_drafts = {"DecodeOnly"} if runner_name == "V1" else set()  # V2's ngram always drafts
    assert set(states) == without_drafts | {
        "PrefillNoCache",
        "PrefillCacheHit",
        "ChunkedPrefill",
        "SpecDecoding",
    }


BF16_TOLERANCE = 0.15
"""Largest difference of a log-probability from transformers' in bfloat16, in nats: the two run the
same sums in another order, with eight bits of mantissa."""


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_bf16_log_probabilities_stay_within_tolerance(qwen3, seed, runner_name):
    prompts = prompts_of(seed, [5, 60, 33, 90])
    with engine_of(runner_name, qwen3, dtype="bfloat16", max_num_batched_tokens=48) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in prompts], greedy(1, prompt_logprobs=0), use_tqdm=False
        )
    got = torch.tensor(
        [
            output.prompt_logprobs[position][prompt[position]].logprob
            for prompt, output in zip(prompts, outputs)
            for position in range(1, len(prompt))
        ]
    )

    def log_probabilities(dtype):
        hf = AutoModelForCausalLM.from_pretrained(qwen3, dtype=dtype)
        rows = []
        for prompt in prompts:
            with torch.no_grad():
                logits = hf(torch.tensor([prompt])).logits[0, :-1].float()
            rows.append(logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
        return torch.cat(rows)

    theirs, exact = log_probabilities(torch.bfloat16), log_probabilities(torch.float32)
    assert (got - theirs).abs().max() < BF16_TOLERANCE
    # No further from the truth than transformers is.
    assert (got - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()
