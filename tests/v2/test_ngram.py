"""Drafts that are looked up, against a scalar reading of Triton's kernels."""

import numpy as np
import pytest
import torch

from vllm_npu_prep.runner.v2.ngram import look_up


def kernels(tokens, length, last, smallest, largest, num_drafts):
    """``_ngram_scan_kernel`` and ``_ngram_finalize_kernel`` for one request."""
    stride = len(tokens) + 1
    best = 0
    if length >= smallest:
        for size in range(smallest, largest + 1):
            for pos in range(length - size):
                if tokens[pos : pos + size] == tokens[length - size : length]:
                    best = max(best, size * stride + pos + 1)
    if not best:
        return [last] * num_drafts
    size, pos = divmod(best - 1, stride)
    begin = pos + size
    return [tokens[begin + k] if begin + k < length else last for k in range(num_drafts)]


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (1, 3), (2, 4)])
def test_what_followed_the_last_place(seed, smallest, largest):
    rng, found = np.random.default_rng(seed), set()
    for _ in range(60):
        number, width, num_drafts = 7, int(rng.integers(1, 40)), int(rng.integers(1, 5))
        tokens = rng.integers(0, 4, (number, width)).astype(np.int32)
        lengths = rng.integers(0, width + 1, number).astype(np.int32)
        last = np.array([row[max(n - 1, 0)] + 10 for row, n in zip(tokens, lengths)], np.int32)
        given = look_up(
            *(torch.from_numpy(each) for each in (tokens, lengths, last)),
            smallest,
            largest,
            num_drafts,
        )
        expected = [
            kernels(row, length, token, smallest, largest, num_drafts)
            for row, length, token in zip(tokens.tolist(), lengths.tolist(), last.tolist())
        ]
        assert given.dtype == torch.int32
        assert given.tolist() == expected
        found |= {len({*row} & {*range(4)}) > 0 for row in expected}
    assert found == {False, True}
