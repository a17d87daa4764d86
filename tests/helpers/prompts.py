"""Prompts: random ones, and questions as a chat template puts them."""

from typing import Any

import numpy as np

VOCAB = 512


def prompts_of(seed: int, lengths: list[int]) -> list[list[int]]:
    """Prompts of these lengths, without the special tokens 0 and 1."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, length).tolist() for length in lengths]


def chat_prompt(tokenizer: Any, question: str) -> list[int]:
    """Token ids of a user's question, up to where the answer begins."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
