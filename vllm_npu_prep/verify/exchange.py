"""Rows of the exchange of tokens between the ranks of experts (MC2): the plugin's own calls."""

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from vllm_npu_prep.aclnn import first_release, missing_functions
from vllm_npu_prep.attention.fused_releases import version_of
from vllm_npu_prep.device import cann_version, device_name
from vllm_npu_prep.device.mc2 import OPERATORS, Mc2, join, limits_of
from vllm_npu_prep.ops.npu.experts import Rows, UnquantisedExperts, compute_on_ranks
from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.collectives import team
from vllm_npu_prep.verify.outcome import NotHereError, Outcome, worst_of
from vllm_npu_prep.verify.row import Row, RowContext, compare, uniform
from vllm_npu_prep.wording import counted

EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 1024, 32
TOKENS, OF_RANKS = 5, (3, 0, 5, 1)
"""Tokens of each rank with padding, and without: rank 1 has none."""
ROUNDED = 0.05
"""Difference that is allowed where rows are rounded to int8: a level is 1/127 of a row's
maximum."""


class _RoundedRows(UnquantisedExperts):
    """Experts that get rows in int8, and multiply what these stand for."""

    quant_mode = 1

    def up(self, rows: Rows) -> torch.Tensor:
        assert rows.scales is not None
        values = rows.values.float() * rows.scales[:, None]
        return super().up(rows._replace(values=values.to(self.layer.w2_weight.dtype), scales=None))


def _of_rank(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a rank's tokens, ids and weights, also of its padding."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].int()
    weights = uniform(TOKENS, TOP_K, dtype=torch.float32, seed=20 + rank).abs() + 0.1
    return uniform(TOKENS, HIDDEN, dtype=dtype, seed=40 + rank), ids, weights


def _exchange(dtype: torch.dtype, is_rounded: bool, context: RowContext) -> Outcome:
    """Compare how many rows each expert gets, and each token's sum, with the formula."""
    limits = limits_of(device_name("npu"), version_of(cann_version("npu")))
    for function in missing_functions(OPERATORS).values():
        raise NotHereError(f"CANN has no {function}; CANN {first_release(function)} has it")
    if limits is None or context.num_ranks not in limits.ranks:
        raise NotHereError(f"this chip and release don't take {counted(context.num_ranks, 'rank')}")
    w13 = uniform(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype, seed=1) / 32
    w2 = uniform(EXPERTS, HIDDEN, INNER, dtype=dtype, seed=2) / 16
    rank, local = context.rank, EXPERTS // context.num_ranks
    mine, number = slice(rank * local, (rank + 1) * local), OF_RANKS[rank]
    layer = SimpleNamespace(w13_weight=context.put(w13[mine]), w2_weight=context.put(w2[mine]))
    kind = _RoundedRows if is_rounded else UnquantisedExperts
    experts = kind(layer, lambda rows: torch.ops.npu.npu_swiglu(rows, -1))
    x, ids, weights = _of_rank(rank, dtype)
    sent = torch.cat([_of_rank(r, dtype)[1][: OF_RANKS[r]] for r in range(context.num_ranks)])
    with team(context):
        active = context.put(torch.arange(TOKENS) < number)
        name, place = join(range(context.num_ranks))
        ranks = Mc2(name, place, context.num_ranks, TOKENS, limits.comm_alg, active)
        given = context.put(x), context.put(weights), context.put(ids)
        got = compute_on_ranks(*given, EXPERTS, ranks, experts)
        numbers = torch.ops.npu.npu_moe_distribute_dispatch_v2(
            *given[::2],
            name,
            context.num_ranks,
            place,
            EXPERTS,
            x_active_mask=active,
            comm_alg=limits.comm_alg,
        )[3]
        expected = formulas.experts(x, w13, w2, weights, ids, range(EXPERTS))
        tolerance = ROUNDED if is_rounded else None
        outcomes = [
            compare(got[:number], expected[:number], f"{number} tokens", tolerance=tolerance),
            compare(
                numbers.cpu(),
                torch.bincount(sent.flatten(), minlength=EXPERTS)[mine],
                "rows of each expert",
                where=("expert",),
            ),
        ]
        dist.barrier()
    return worst_of(outcomes, f"{EXPERTS} experts on {counted(context.num_ranks, 'rank')}")


def _row(name: str, what: str, dtype: torch.dtype, is_rounded: bool, ranks: int = 2) -> Row:
    run = partial(_exchange, dtype, is_rounded)
    return Row(f"mc2-{name}", f"tokens to their experts and back, {what}", run, ranks=ranks)


ROWS = (
    _row("bf16", "as they are", torch.bfloat16, False),
    _row("fp16", "as they are", torch.float16, False),
    _row("int8", "rounded to int8", torch.bfloat16, True),
    _row("four", "among four ranks", torch.bfloat16, False, ranks=4),
)
