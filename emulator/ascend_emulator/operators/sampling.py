"""Reference of the operator that keeps the most likely tokens."""

from functools import partial

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.constraint import Constraint, Enforced, Family, shape_of

TOP_K_TOP_P = "npu::npu_top_k_top_p"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

NAME = "npu_top_k_top_p"
record = partial(Constraint, NAME)
PRACTICE = Enforced.PRACTICE
NO_DOCSTRING = "no docstring"
DOCUMENTATION = (
    "Ascend/op-plugin, its page of `npu_top_k_top_p`; cann/ops-nn 9.1.0, `aclnnApplyTopKTopP`"
)

# In each record: argument, name, demand, docstring_says, practice, source, enforced, why.
TOP_K_TOP_P_RULES = Family(
    NAME,
    [
        record(
            "logits",
            "dtype",
            "float16, bfloat16 or float32",
            NO_DOCSTRING,
            "these three",
            DOCUMENTATION,
            PRACTICE,
        ),
        record(
            "logits",
            "rank",
            "rank 2",
            NO_DOCSTRING,
            "2 dimensions",
            DOCUMENTATION,
            PRACTICE,
        ),
        record(
            "p, k",
            "limits",
            "p, k or both",
            NO_DOCSTRING,
            "either may be missing",
            "cann/ops-nn 9.1.0, `CheckNotNull` of its aclnn function; op-plugin's documentation: "
            "both required",
            PRACTICE,
        ),
        record(
            "p, k",
            "limit dtype",
            "p with the dtype of logits, k with int32",
            NO_DOCSTRING,
            "the same",
            DOCUMENTATION,
            PRACTICE,
        ),
        record(
            "p, k",
            "limit shape",
            "one value for each row of logits",
            NO_DOCSTRING,
            "the same",
            DOCUMENTATION,
            PRACTICE,
        ),
        record(
            "p",
            "p range",
            "0 to 1",
            NO_DOCSTRING,
            "the same",
            DOCUMENTATION,
            PRACTICE,
        ),
        record(
            "k",
            "k range",
            "1 to the columns of logits; at most 1024 in profiles 8.5 and docs",
            NO_DOCSTRING,
            "the columns since CANN 9.0; before, and in op-plugin's documentation, at most 1024",
            f"{DOCUMENTATION} (v8.5.0: 1024, v9.0.0: the columns)",
            PRACTICE,
            "code of 8.5 checks nothing: its kernel has room for 1024 and reads past it",
        ),
        record(
            "p",
            "order of sums",
            "probabilities added up from the smallest; tokens go while the sum is at most 1 - p, "
            "the most likely one stays",
            NO_DOCSTRING,
            "the same",
            DOCUMENTATION,
            PRACTICE,
            refused=False,
        ),
        record(
            "k",
            "ties at k",
            "all tokens that are as likely as the k-th are kept",
            NO_DOCSTRING,
            "the same",
            DOCUMENTATION,
            PRACTICE,
            refused=False,
        ),
    ],
)


def largest_k(num_tokens: int) -> int:
    """Return the profile's largest k for logits of so many columns."""
    profile = profiles.current()
    is_limited = profile.release == "8.5" or profile.documentation
    return min(num_tokens, 1024) if is_limited else num_tokens


def top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None
) -> torch.Tensor:
    """Return logits ``[B, V]`` with -inf for tokens that top-k or top-p leaves out."""
    demand = TOP_K_TOP_P_RULES.call(TOP_K_TOP_P).demand
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
