"""SmolLM2-135M-Instruct, a real chat model: its tokens are those of transformers on real text."""

import pytest
import torch

from tests.helpers.engine import generate, graphs, greedy
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.watch import count_preemptions, count_verified

CHATS = (
    "What is the capital of France?",
    "Count from one to thirty, separated by commas.",
    "Write a Python function that returns the largest number of a list.",
    "Repeat this sentence three times: The cat sat on the mat, and the mat was red.",
    "Translate into French: good morning, my friend.",
    "Name the planets of the solar system.",
    "Who wrote Romeo and Juliet?",
    "Explain in two sentences why the sky is blue.",
    "List five animals that live in the sea.",
    "What is seventeen times three?",
    "Write a haiku about rain.",
    "Give me a recipe for pancakes, with a list of what I need.",
)
MAX_TOKENS = 32
CLOSE = 1e-3
"""A token counts as right if transformers gives it a logit that is at most this much below the
best one: float32 sums in another order differ by some 1e-4 here."""


@pytest.fixture(scope="module")
def smol(real_model):
    """The model's folder, its prompts, and transformers' model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], add_generation_prompt=True, return_dict=False
        )
        for chat in CHATS
    ]
    network = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()
    return real_model, tokenizer, prompts, network


@torch.no_grad()
def distances(network, prompts, tokens) -> list[float]:
    """How far below the best logit each generated token is, by transformers, teacher-forced."""
    far = []
    for prompt, generated in zip(prompts, tokens, strict=True):
        logits = network(torch.tensor([prompt + generated[:-1]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
        far += (logits.max(1).values - chosen).tolist()
    return far


@pytest.mark.parametrize("runner", RUNNERS)
def test_chats_in_graphs_with_chunks_and_drafts(smol, runner):
    """Prompts are cut, the cache is too small for all, and ngram drafts are verified."""
    folder, tokenizer, prompts, network = smol
    long = tokenizer.encode("\n".join(CHATS) + "\n") * 2
    prompts = [*prompts[:4], long + prompts[4]]
    with engine_of(
        runner,
        folder,
        max_model_len=640,
        max_num_batched_tokens=128,
        block_size=16,
        num_gpu_blocks_override=42,
        kv_cache_memory_bytes=None,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        **graphs("FULL_AND_PIECEWISE", 4, 16, 32),
    ) as llm:
        preempted, verified = count_preemptions(llm), count_verified(llm)
        tokens = generate(llm, prompts, greedy(MAX_TOKENS))
    assert len(long) > 256, "the prompt has several chunks"
    assert preempted["preempted"] > 0
    assert min(verified[what] for what in ("accepted", "rejected")) > 0
    assert max(distances(network, prompts, tokens)) < CLOSE
    assert "Paris" in tokenizer.decode(tokens[0])
