"""Random prompts."""

import numpy as np

VOCAB = 512


def prompts_of(seed: int, lengths: list[int]) -> list[list[int]]:
    """Prompts of these lengths, without the special tokens 0 and 1."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, length).tolist() for length in lengths]
