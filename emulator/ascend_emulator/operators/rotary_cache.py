"""Reference of the rotary operator that gathers cosines and sines by position."""

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.constraint import Call, shape_of

MROPE = "npu::npu_mrope"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ALIGNMENT = 64
"""Heads, and the part of a head that is rotated, are multiples of this many bytes."""
COPIED_IF_STRIDED = ("positions", "cos_sin_cache")
"""The others go to the kernel with the strides of their rows (``aclnnRopeWithSinCosCache`` of CANN
9.1; 8.5 copies cos_sin_cache alone, and reads positions one after another)."""
SECTIONS = ((16, 24, 24), (24, 20, 20), (8, 12, 12), (16, 16, 16, 16))

BUFFER = 192 << 10
"""Bytes of the unified buffer of A2 and A3, in which a token's heads are rotated in float32."""


def mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate heads of query and key ``[T, N * D]`` by their positions' cosines and sines."""
    sections = tuple(mrope_section or (0, 0, 0))
    _check(positions, query, key, cos_sin_cache, head_size, sections, rotary_mode, cache_mode)
    cos, sin = cos_sin_cache.float()[positions.long()].chunk(2, -1)
    if sections[0]:
        which = _sections_of(sections, cache_mode == "interleave")
        cos, sin = (_merged(factors, which) for factors in (cos, sin))
    rotate = _rotate_half if rotary_mode == "half" else _rotate_interleaved
    size = cos_sin_cache.shape[1]
    results = []
    for x in (query, key):
        heads = x.float().reshape(len(x), -1, head_size)
        rotated = rotate(heads[..., :size], cos[:, None], sin[:, None])
        whole = torch.cat((rotated, heads[..., size:]), -1)
        results.append(whole.reshape(x.shape).to(x.dtype))
    return results[0], results[1]


def _sections_of(sections: tuple[int, ...], interleaved: bool) -> torch.Tensor:
    """Return the row of `positions` that each frequency follows, int64 ``[rotary_dim / 2]``."""
    if not interleaved:
        return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))
    which = torch.zeros(sum(sections), dtype=torch.int64)
    for row in (1, 2):
        which[row : 3 * sections[row] : 3] = row
    return which


def _merged(factors: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Gather the row of each frequency, ``[T, F]``, from ``[sections, T, F]``."""
    return factors.gather(0, which.expand(1, *factors.shape[1:]))[0]


def _rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def _check(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cache: torch.Tensor,
    head_size: int,
    sections: tuple[int, ...],
    rotary_mode: str | None,
    cache_mode: str | None,
) -> None:
    call: Call = Call("npu_mrope", MROPE)
    demand = call.demand
    tensors = {"query": query, "key": key, "cos_sin_cache": cache}
    demand("dtype", query.dtype in DTYPES, query.dtype)
    demand("positions dtype", positions.dtype in (torch.int32, torch.int64), positions.dtype)
    for argument, tensor in tensors.items():
        demand("rank", tensor.dim() == 2, shape_of(tensor), argument)
        demand("same dtype", tensor.dtype == query.dtype, tensor.dtype, argument)
    demand("rotary_mode", rotary_mode in ("half", "interleave"), repr(rotary_mode))
    modes = ("default", "interleave") if sections[0] and len(sections) == 3 else ("default",)
    size = cache.shape[1]
    known = sections == (0, 0, 0) or (sections in SECTIONS and 2 * sum(sections) == size)
    demand("mrope_section", known, f"{list(sections)} for {size} columns")
    demand("cache_mode", cache_mode in modes, f"{cache_mode!r} with sections {list(sections)}")
    shape = (len(sections), len(query)) if sections[0] else (len(query),)
    rank_is_right = positions.dim() == len(shape) and shape_of(positions)[:-1] == shape[:-1]
    demand("positions shape", rank_is_right, shape_of(positions))
    counts = f"{positions.shape[-1]}, {len(query)} and {len(key)}"
    same = 0 < len(query) == len(key) == positions.shape[-1]
    demand("token count", same, counts, "positions, query and key")
    aligned = ALIGNMENT // query.element_size()
    demand("head size", head_size > 0 and head_size % aligned == 0, head_size)
    demand("rotary size", size % aligned == 0 and 0 < size <= head_size, size)
    for argument, tensor in list(tensors.items())[:2]:
        demand("whole heads", tensor.shape[1] % head_size == 0, shape_of(tensor), argument)
        demand("dense rows", tensor.stride(1) == 1, f"strides {tensor.stride()}", argument)
    if profiles.current().release == "8.5":
        demand("cache_mode of 8.5", cache_mode == "default", repr(cache_mode))
        heads = max(query.shape[1], key.shape[1]) // head_size
        words = (5 if rotary_mode == "half" else 6) * size + 2 * head_size
        tokens_at_once = (BUFFER - 10 * size * 4) // (heads * words * 4)
        demand("heads of 8.5", tokens_at_once > 0, f"{heads} heads of {head_size}")
    outside = positions[(positions < 0) | (positions >= len(cache))]
    demand("positions range", not outside.numel(), f"{outside.tolist()} of {len(cache)} rows")
