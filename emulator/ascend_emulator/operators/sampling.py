"""Reference of the operator that keeps the most likely tokens."""

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.constraint import Call, shape_of

TOP_K_TOP_P = "npu::npu_top_k_top_p"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def largest_k(num_tokens: int) -> int:
    """Return the profile's largest k for logits of so many columns."""
    profile = profiles.current()
    is_limited = profile.release == "8.5" or profile.documentation
    return min(num_tokens, 1024) if is_limited else num_tokens


def top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None
) -> torch.Tensor:
    """Return logits ``[B, V]`` with -inf for tokens that top-k or top-p leaves out."""
    demand = Call("npu_top_k_top_p", TOP_K_TOP_P).demand
    demand("dtype", logits.dtype in DTYPES, logits.dtype)
    demand("rank", logits.dim() == 2, shape_of(logits))
    demand("limits", p is not None or k is not None, "neither")
    for argument, limit, dtype in (("p", p, logits.dtype), ("k", k, torch.int32)):
        if limit is not None:
            demand("limit dtype", limit.dtype == dtype, limit.dtype, argument)
            demand("limit shape", shape_of(limit) == (len(logits),), shape_of(limit), argument)
    num_tokens = logits.shape[1]
    values, indices = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        outside = k[(k < 1) | (k > largest_k(num_tokens))]
        demand("k range", not outside.numel(), f"{outside.tolist()} of {num_tokens}")
        threshold = values.gather(1, (num_tokens - k.long())[:, None])
        values = values.masked_fill(values < threshold, float("-inf"))
    if p is not None:
        outside = p[~((p >= 0) & (p <= 1))]
        demand("p range", not outside.numel(), outside.tolist())
        left_out = values.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None]
        left_out[:, -1] = False
        values = values.masked_fill(left_out, float("-inf"))
    return torch.empty_like(values).scatter_(1, indices, values).to(logits.dtype)
