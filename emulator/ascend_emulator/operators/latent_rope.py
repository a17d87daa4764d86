"""References of the operators that norm and rotate what latent attention reads."""

import torch

from ascend_emulator.api import touch
from ascend_emulator.operators.constraint import Call, shape_of

INTERLEAVE_ROPE = "npu::npu_interleave_rope"
KV_RMSNORM_ROPE_CACHE = "npu::npu_kv_rmsnorm_rope_cache"
HALF = (torch.float16, torch.bfloat16)
LATENT, ROPE = 512, 64
"""Columns of a row that are normalised, and those after them that are rotated."""
PAGED = ("PA", "PA_BNSD")
CACHES = ("k_cache", "ckv_cache")


def interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbours; the result has all first halves of pairs before the second."""
    demand = Call("npu_interleave_rope", INTERLEAVE_ROPE).demand
    demand("dtype", x.dtype in HALF, x.dtype)
    sizes = shape_of(x)
    demand("shape", len(sizes) == 4 and all(sizes) and sizes[-1] == ROPE, sizes)
    for argument, factor in {"cos": cos, "sin": sin}.items():
        demand("same dtype", factor.dtype == x.dtype, factor.dtype, argument)
        fits = shape_of(factor) in [(sizes[0], 1, s, ROPE) for s in (1, sizes[2])]
        fits = fits and factor.shape == cos.shape
        demand("shape of factors", fits, f"{shape_of(factor)} for {sizes}", argument)
    return _rotated(x, cos, sin)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    halves = torch.cat((x[..., ::2], x[..., 1::2]), -1).float()
    first, second = halves.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (halves * cos.float() + turned * sin.float()).to(x.dtype)


def kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write rotated keys and normalised latent rows to the slots of `index`.

    The results are both caches, and the rows themselves if `is_output_kv`. The schema doesn't say
    that the caches are written, so the emulated runtime returns copies of them.
    """
    call = Call("npu_kv_rmsnorm_rope_cache", KV_RMSNORM_ROPE_CACHE)
    others = {
        "k_rope_scale": k_rope_scale,
        "c_kv_scale": c_kv_scale,
        "k_rope_offset": k_rope_offset,
        "c_kv_offset": c_kv_offset,
        "v": v,
    }
    given = [name for name, value in others.items() if value is not None]
    call.demand("form", not given, given)
    call.demand("cache_mode", cache_mode in PAGED, repr(cache_mode))
    _check_rows(call, kv, gamma, cos, sin)
    tokens = kv.shape[0] * kv.shape[2]
    fits = index.dtype == torch.int64 and index.numel() == tokens
    call.demand("index", fits, f"{shape_of(index)} {index.dtype} for {tokens} tokens")
    for argument, cache, size in (("k_cache", k_cache, ROPE), ("ckv_cache", ckv_cache, LATENT)):
        call.demand("dtype", cache.dtype == kv.dtype, cache.dtype, argument)
        fits = cache.dim() == 4 and shape_of(cache)[2:] == (1, size)
        fits = fits and cache.shape[1] % 16 == 0 and cache.shape[:2] == k_cache.shape[:2]
        call.demand("cache shape", fits, shape_of(cache), argument)
        call.demand(
            "contiguous cache", cache.is_contiguous(), f"strides {cache.stride()}", argument
        )
    slots = index.flatten()
    count = k_cache.shape[0] * k_cache.shape[1]
    outside = slots[slots >= count].tolist()
    call.demand("slots", not outside, f"{outside} of {count}")
    latent, rope = kv.split((LATENT, ROPE), -1)
    reciprocal = (latent.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    normed = (latent.float() * reciprocal * gamma.float()).to(kv.dtype)
    rotated = _rotated(rope, cos, sin)
    written = slots >= 0
    for cache, rows in ((k_cache, rotated), (ckv_cache, normed)):
        touch(cache, slots[written] // cache.shape[1], write=True)
        cache.view(count, -1)[slots[written]] = rows.reshape(tokens, -1)[written]
    if not is_output_kv:
        rotated, normed = (torch.full_like(rows, torch.nan) for rows in (rotated, normed))
    return k_cache, ckv_cache, rotated, normed


def _check_rows(
    call: Call, kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    call.demand("dtype", kv.dtype in HALF, kv.dtype, "kv")
    sizes = shape_of(kv)
    fits = len(sizes) == 4 and all(sizes) and sizes[1] == 1 and sizes[3] == LATENT + ROPE
    call.demand("shapes", fits, sizes, "kv")
    call.demand("shapes", shape_of(gamma) == (LATENT,), shape_of(gamma), "gamma")
    for argument, factor in {"gamma": gamma, "cos": cos, "sin": sin}.items():
        call.demand("dtype", factor.dtype == kv.dtype, factor.dtype, argument)
    allowed = [(sizes[0], 1, s, ROPE) for s in (1, sizes[2])]
    for argument, factor in {"cos": cos, "sin": sin}.items():
        fits = shape_of(factor) in allowed and factor.shape == cos.shape
        call.demand("shapes", fits, f"{shape_of(factor)} for {sizes}", argument)
