"""Whether samples follow a distribution."""

import numpy as np


def follows(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """By chi-squared, rare outcomes together; a fair sampler fails once in a million runs."""
    counts, expected = counts.ravel(), probabilities.ravel() * counts.sum()
    if counts[expected == 0].any():  # outcomes that can't be
        return False
    often = expected >= 8
    wanted = np.append(expected[often], expected[~often].sum())
    got = np.append(counts[often], counts[~often].sum())
    wanted, got = wanted[wanted > 0], got[wanted > 0]
    statistic, freedom = float(((got - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    assert freedom >= 2
    # Exceeded once in a million times (Wilson and Hilferty's approximation)
    ninth = 2 / (9 * freedom)
    return statistic < freedom * (1 - ninth + 4.753 * ninth**0.5) ** 3
