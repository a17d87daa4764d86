"""What Hugging Face transformers makes of the models and prompts of a test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


def load(folder: Path, dtype: torch.dtype = torch.float32, loader: Any = None, **how: Any) -> Any:
    """A model by transformers, whose attention is its plain code.

    An engine in this process lets transformers take some models' configs for others'.
    """
    import transformers

    how |= {"dtype": dtype, "attn_implementation": "eager"}
    named = json.loads((folder / "config.json").read_text())["architectures"][0]
    loader = loader or getattr(transformers, named, transformers.AutoModelForCausalLM)
    return loader.from_pretrained(folder, **how).eval()


def reference(
    folder: Path, prompts: list[list[int]], max_tokens: int, dtype: torch.dtype = torch.float32
) -> list[list[int]]:
    """Greedy tokens of transformers, a prompt at a time."""
    return greedy_tokens(load(folder, dtype), prompts, max_tokens)


@torch.no_grad()
def greedy_tokens(network: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy tokens of a model of transformers, a prompt at a time."""
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            suppress_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        out.append(generated[0, len(prompt) :].tolist())
    return out


def logits_of(folder: Path) -> Callable[[list[int]], np.ndarray]:
    """Function of a sequence: logits behind each of its tokens, float64 ``[len, vocab_size]``."""
    return logits_by(load(folder))


def logits_by(network: Any) -> Callable[[list[int]], np.ndarray]:
    """As `logits_of`, of a model of transformers that is loaded."""

    @torch.no_grad()
    def run(token_ids: list[int]) -> np.ndarray:
        return network(torch.tensor([token_ids])).logits[0].double().numpy()

    return run


def is_varied(tokens: list[list[int]]) -> bool:
    """Whether there are many different ones: a model that repeats itself would be a weak oracle."""
    return len({token for row in tokens for token in row}) > 3 * len(tokens)
