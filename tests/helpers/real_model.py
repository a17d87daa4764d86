"""SmolLM2-135M-Instruct, a real chat model: conversations, and transformers' tokens for them."""

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch

from tests.helpers.demo import CACHE
from tests.helpers.huggingface import load

CLOSE = 1e-3
"""Where transformers' two best logits are nearer to each other than this, either is right: sums of
float32 in another order differ by some 1e-4 here."""


class Greedy(NamedTuple):
    """Greedy tokens of a prompt by transformers in float32."""

    tokens: list[int]  # [max_tokens]
    margins: list[float]  # [max_tokens]: how far the best logit is above the second


@functools.cache
def tokenizer_of(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def chat_prompt(folder: Path, *turns: str) -> list[int]:
    """Tokens of a conversation that a user begins, up to where the model answers."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return tokenizer_of(folder).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def reference(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[Greedy]:
    """Greedy tokens of transformers, which don't end at the end of an answer.

    Kept in the cache: prompts that were asked for are not computed again for the same model.
    """
    key = _digest(folder, prompts, max_tokens)
    kept = CACHE / "smollm2-reference" / f"{key}.json"
    if not kept.exists():
        found = _generate(folder, prompts, max_tokens)
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(found))
        part.rename(kept)
    return [Greedy(*row) for row in json.loads(kept.read_text())]


def _digest(folder: Path, prompts: list[list[int]], max_tokens: int) -> str:
    import transformers

    asked = [transformers.__version__, torch.__version__, prompts, max_tokens]
    digest = hashlib.sha256(json.dumps(asked).encode())
    for name in ("config.json", "model.safetensors"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def _generate(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[Greedy]:
    network, found = load(folder), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best, second = torch.stack(generated.logits)[:, 0].topk(2).values.unbind(1)
        found.append(
            Greedy(generated.sequences[0, len(prompt) :].tolist(), (best - second).tolist())
        )
    return found
