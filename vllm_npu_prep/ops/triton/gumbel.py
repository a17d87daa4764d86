"""Gumbel noise by seed and position, hashed as upstream's V2 sampler hashes it.

The source is ``vllm/v1/worker/gpu/sample/gumbel.py``: ``murmur3_uniform32``, ``murmur3_uniform64``
and ``gumbel_noised_argmax``. The hash is MurmurHash3 of five words, the last of which is the
token's index.
"""

import torch

WORD = 0xFFFFFFFF
HIGH = 0x9E3779B9
"""First word of the hash that gives the higher bits of a number with 53 bits."""


def gumbel_noise(
    seeds: torch.Tensor,
    pos: torch.Tensor,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the noise of each token of the vocabulary, ``[num_rows, vocab_size]``.

    The seeds of requests and the positions that are sampled from are int64 ``[num_rows]``. A dtype
    of float64 gives other numbers, whose tails are finer.
    """
    tokens = torch.arange(vocab_size, device=seeds.device)
    if dtype == torch.float64:
        return -torch.log(-torch.log(_uniform64(seeds, pos, tokens)))
    uniform = _uniform(seeds, pos, tokens)
    # The kernel has a series for small values, because its backends lack this function
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2**-24)))


def seeded_uniform(seeds: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Return a number between 0 and 1, both excluded, for each row: the kernel's for token 0.

    Seeds and positions are int64 ``[num_rows]``, the result is float32.
    """
    first = torch.zeros(1, dtype=torch.int64, device=seeds.device)
    return _uniform(seeds, pos, first)[:, 0].clamp(max=1 - 2**-24)


def _uniform(seeds: torch.Tensor, pos: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    hashed = _hashed(seeds, pos, tokens)
    high, low = (hashed >> 16).float(), (hashed & 0xFFFF).float()
    return high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10


def _uniform64(seeds: torch.Tensor, pos: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return float64 numbers of 53 bits: all 32 of one hash, and the highest 21 of another."""
    high, low = _hashed(seeds, pos, tokens, HIGH), _hashed(seeds, pos, tokens)
    uniform = (((high << 21) | (low >> 11)).double() + 0.5) * 2**-53
    return uniform.clamp_(max=1 - 2**-53)  # the largest rounds to 1


def _hashed(
    seeds: torch.Tensor, pos: torch.Tensor, tokens: torch.Tensor, domain: int = 0
) -> torch.Tensor:
    prefix = torch.full_like(seeds, domain)
    for key in (seeds & WORD, (seeds >> 32) & WORD, pos & WORD):
        prefix = _mixed(prefix, key)
    return _finished(_mixed(prefix[:, None], tokens[None, :]) ^ 16)


def _times(value: torch.Tensor, factor: int) -> torch.Tensor:
    """Multiply modulo 2**32, in halves so that no product exceeds int64."""
    low, high = value & 0xFFFF, value >> 16
    return (low * factor + (((high * factor) & 0xFFFF) << 16)) & WORD


def _rotated(value: torch.Tensor, shift: int) -> torch.Tensor:
    return ((value << shift) & WORD) | (value >> (32 - shift))


def _mixed(hashed: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    key = _times(_rotated(_times(key, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotated(hashed ^ key, 13) * 5 + 0xE6546B64) & WORD


def _finished(hashed: torch.Tensor) -> torch.Tensor:
    hashed = _times(hashed ^ (hashed >> 16), 0x85EBCA6B)
    hashed = _times(hashed ^ (hashed >> 13), 0xC2B2AE35)
    return hashed ^ (hashed >> 16)
