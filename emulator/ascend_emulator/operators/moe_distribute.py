"""References of the operators that send tokens to the ranks of their experts, and bring them back.

Both exchange rows over the communicator that ``group_ep`` names. Rows are received by expert, then
by the rank that sent them, then by token. What a device leaves undefined holds NaN here: received
rows past the last one, and results of tokens that the mask leaves out. ``assist_info_for_combine``
is this reference's own: rank, token and place in the token's row of ids for each received row.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ascend_emulator import exchange, faults, profiles
from ascend_emulator.operators import schemas
from ascend_emulator.operators.constraint import Call, shape_of

DISPATCH = "npu::npu_moe_distribute_dispatch_v2"
COMBINE = "npu::npu_moe_distribute_combine_v2"
KERNELS = {DISPATCH: "MoeDistributeDispatchV2", COMBINE: "MoeDistributeCombineV2"}

DTYPES = (torch.float16, torch.bfloat16)
RANKS_OF_A2 = (*range(2, 9), 16, 32, 64, 128, 256)
RANKS_OF_A3 = range(2, 769)
MAX_EXPERTS, MAX_EXPERTS_A2_8_5, MAX_EXPERTS_OF_RANK_A2_8_5 = 1024, 512, 24
MAX_TOKENS = {"A2": 256, "A3": 512}
MAX_TOP_K = 16
MAX_WIDTH_A2, WIDTHS_OF_A3 = 7168, range(1024, 8193)
UNQUANTISED, DYNAMIC = 0, 2
DEFAULT_BUFFER = 200
"""MB of ``HCCL_BUFFSIZE`` unless it is given."""
INFO_OF_ROW = 128
UNDEFINED_INT8 = -128
HANDLED = (
    *("x", "expand_x", "expert_ids", "group_ep", "ep_world_size", "ep_rank_id", "moe_expert_num"),
    *("scales", "x_active_mask", "expert_scales", "expand_scales", "group_tp", "tp_world_size"),
    *("tp_send_counts", "assist_info_for_combine", "ep_send_counts", "expert_shard_type"),
    *("shared_expert_num", "shared_expert_rank_num", "quant_mode", "global_bs"),
    *("expert_token_nums_type", "comm_alg"),
)
"""Arguments that the references know; every other one has to keep its default."""
Demand = Callable[..., None]
COMMUNICATION = {"A2": ("", "fullmesh"), "A3": ("", "fullmesh_v1")}


@dataclass(frozen=True)
class Exchange:
    """One call's tokens and ranks, after its arguments were checked."""

    operator: str
    group: str
    rank: int
    ranks: int
    experts: int
    tokens: int  # BS
    most_tokens: int  # of a rank
    width: int
    ids: torch.Tensor  # int64 [active, K]

    @property
    def local(self) -> int:
        return self.experts // self.ranks

    @property
    def rows(self) -> int:
        """A: most rows that a rank may receive."""
        return self.ranks * self.most_tokens * min(self.local, self.ids.shape[1])

    def pairs(self) -> list[torch.Tensor]:
        """Return the pairs of token and place that go to each rank, by expert, then by token."""
        flat = self.ids.flatten()
        order = flat.argsort(stable=True)
        rank_of = flat[order] // self.local
        return [order[rank_of == rank] for rank in range(self.ranks)]


def _chip() -> str:
    return "A3" if os.environ.get(profiles.SOC, "").startswith("Ascend910_93") else "A2"


def _is_hierarchic(comm_alg: str) -> bool:
    """Tell whether A2 takes the form of two levels, which variables choose without `comm_alg`."""
    asked = os.environ.get("HCCL_INTRA_PCIE_ENABLE"), os.environ.get("HCCL_INTRA_ROCE_ENABLE")
    return comm_alg == "" and _chip() == "A2" and asked == ("1", "0")


def needed_buffer(chip: str, call: Exchange) -> int:
    """Return the bytes of a communicator's buffer that the documentation asks for."""
    top_k = call.ids.shape[1]
    if chip == "A2":
        pairs = call.most_tokens * call.ranks * min(call.local, top_k)
        return 2 * (pairs * call.width * 2 + (2 << 20))
    dispatched = -(-(-(-2 * call.width // 32) * 32 + 64) // 512) * 512
    combined = -(-2 * call.width // 512) * 512
    rows = call.local * call.most_tokens * call.ranks
    return 2 * (rows * dispatched + top_k * call.most_tokens * combined)


def _bind(operator: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return a call's arguments by their names in the schema."""
    bound = schemas.signature(operator).bind_partial(*given, **named)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


def _checked(demand: Demand, operator: str, width: int, of: Any) -> Exchange:
    """Check what both operators demand, and return what the call exchanges."""
    chip, is_8_5 = _chip(), profiles.current().release == "8.5"
    defaults = schemas.signature(operator).parameters
    others = [
        name
        for name, value in vars(of).items()
        if name not in HANDLED and (torch.is_tensor(value) or value != defaults[name].default)
    ]
    demand("unsupported argument", not others, ", ".join(others))
    expert_ids, x_active_mask, group_ep = of.expert_ids, of.x_active_mask, of.group_ep
    ep_world_size, ep_rank_id = of.ep_world_size, of.ep_rank_id
    moe_expert_num, global_bs, comm_alg = of.moe_expert_num, of.global_bs, of.comm_alg
    shared = of.expert_shard_type, of.shared_expert_rank_num
    kinds = *shared, of.shared_expert_num in (0, 1), of.tp_world_size
    demand("shared experts", kinds[:3] == (0, 0, True) and kinds[3] in (0, 1), kinds)
    is_known = comm_alg in COMMUNICATION[chip] and not _is_hierarchic(comm_alg)
    demand("algorithm", is_known, f"{comm_alg!r} on {chip}")
    demand("group", 0 < len(group_ep) < 128, repr(group_ep))
    if chip == "A3":
        fits = ep_world_size in RANKS_OF_A3
    elif is_8_5:
        fits = 0 < ep_world_size <= 256 and ep_world_size % 8 == 0
    else:
        fits = ep_world_size in RANKS_OF_A2
    demand("ranks", fits, f"{ep_world_size} on {chip}")
    found = exchange.place(group_ep)
    given = f"rank {ep_rank_id} of {ep_world_size} in {group_ep}"
    here = f", this is rank {found[0]} of {found[1]}" if found else ""
    ok = 0 <= ep_rank_id < ep_world_size and found in (None, (ep_rank_id, ep_world_size))
    demand("place", ok, given + here)
    of_rank = moe_expert_num // ep_world_size
    fits = 0 < moe_expert_num <= MAX_EXPERTS and moe_expert_num % ep_world_size == 0
    if chip == "A2" and is_8_5:
        fits = fits and moe_expert_num <= MAX_EXPERTS_A2_8_5
        fits = fits and of_rank <= MAX_EXPERTS_OF_RANK_A2_8_5
    demand("experts", fits, f"{moe_expert_num} on {ep_world_size} ranks of {chip}")
    demand("ids dtype", expert_ids.dtype == torch.int32, expert_ids.dtype)
    demand("ids shape", expert_ids.dim() == 2, shape_of(expert_ids))
    tokens, top_k = expert_ids.shape
    demand("tokens", 0 < tokens <= MAX_TOKENS[chip], f"{tokens} on {chip}")
    demand("K", 0 < top_k <= min(MAX_TOP_K, moe_expert_num), top_k)
    fits = width in (range(32, MAX_WIDTH_A2 + 1, 32) if chip == "A2" else WIDTHS_OF_A3)
    demand("width", fits, f"{width} on {chip}")
    ok = global_bs == 0 or (global_bs % ep_world_size == 0 and global_bs >= tokens * ep_world_size)
    demand("global_bs", ok, f"{global_bs} with {tokens} tokens on {ep_world_size} ranks")
    most = global_bs // ep_world_size or tokens
    active = tokens
    if x_active_mask is not None:
        mask = x_active_mask
        ok = mask.dtype == torch.bool and shape_of(mask) == (tokens,)
        demand("mask", ok, f"{mask.dtype} {shape_of(mask)}")
        active = int(mask.sum())
        demand("order of the mask", bool(mask[:active].all()), mask.tolist())
        demand("mask of uneven ranks", most == tokens, f"{tokens} of up to {most} tokens")
        active = faults.apply("tokens of a mask", active, tokens=tokens)
    ids = expert_ids[:active].long()
    ok = bool(((ids >= 0) & (ids < moe_expert_num)).all())
    demand("ids", ok, ids.tolist())
    ok = all(len(set(row)) == top_k for row in ids.tolist())
    demand("distinct ids", ok, ids.tolist())
    call = Exchange(
        operator, group_ep, ep_rank_id, ep_world_size, moe_expert_num, tokens, most, width, ids
    )
    needed, buffer = needed_buffer(chip, call), os.environ.get("HCCL_BUFFSIZE") or DEFAULT_BUFFER
    demand("buffer", needed <= int(buffer) << 20, f"{buffer} MB, {-(-needed >> 20)} MB are needed")
    return call


def _agree(call: Exchange, *values: int) -> torch.Tensor:
    """Exchange the numbers of rows for each expert, int64 ``[ranks, experts]``, by the sender.

    Raises
    ------
    KernelRefusalError
        If ranks differ in what must be the same on all of them.
    """
    counts = torch.bincount(call.ids.flatten(), minlength=call.experts)
    same = torch.tensor([call.most_tokens, call.width, call.ids.shape[1], call.experts, *values])
    row = torch.cat([same, counts])
    rows = exchange.gather(call.group, KERNELS[call.operator], row, call.ranks)
    demand = Call("npu_moe_distribute_dispatch_v2", call.operator).demand
    for rank, other in enumerate(rows[:, : len(same)].tolist()):
        demand("agreement", other == same.tolist(), f"{same.tolist()}, {other} on rank {rank}")
    return rows[:, len(same) :]


def dispatch(*given: Any, **named: Any) -> tuple[torch.Tensor | None, ...]:
    """Send each token to the ranks of its experts.

    The results are ``[A, H]`` rows, their scales, what `combine` needs, the rows of each expert
    here, the ends of rows by expert and sender, and two that nobody reads.
    """
    of = _bind(DISPATCH, given, named)
    x, expert_ids, scales, quant_mode = of.x, of.expert_ids, of.scales, of.quant_mode
    demand = Call("npu_moe_distribute_dispatch_v2", DISPATCH).demand
    demand("dtype", x.dtype in DTYPES, x.dtype)
    fits = x.dim() == 2 and len(x) == len(expert_ids)
    demand("shapes", fits, f"{shape_of(x)} and {shape_of(expert_ids)}")
    demand("unsupported argument", of.expert_scales is None, "expert_scales")
    demand("quant_mode", quant_mode in (UNQUANTISED, DYNAMIC), quant_mode)
    call = _checked(demand, DISPATCH, x.shape[1], of)
    ok = scales is None or (
        quant_mode == DYNAMIC
        and scales.dtype == torch.float32
        and shape_of(scales) == (call.experts, call.width)
    )
    demand("scales", ok, "none" if scales is None else f"{scales.dtype} {shape_of(scales)}")
    demand("token numbers", of.expert_token_nums_type in (0, 1), of.expert_token_nums_type)

    counts = _agree(call, quant_mode, of.expert_token_nums_type)
    start = call.rank * call.local
    mine = counts[:, start : start + call.local]  # [ranks, local]
    pairs, top_k, kernel = call.pairs(), expert_ids.shape[1], KERNELS[DISPATCH]
    receives = mine.sum(1).tolist()
    rows = [x[pair // top_k] for pair in pairs]
    row_scales: list[torch.Tensor] = []
    if quant_mode == DYNAMIC:
        factors = [1 if scales is None else scales[call.ids.flatten()[pair]] for pair in pairs]
        floats = [part.float() * factor for part, factor in zip(rows, factors)]
        row_scales = [part.abs().amax(-1, keepdim=True) / 127 for part in floats]
        tiny = torch.finfo(torch.float32).tiny
        rows = [
            (part / scale.clamp(min=tiny)).round().to(torch.int8)
            for part, scale in zip(floats, row_scales)
        ]
    come = call.group, kernel, call.rank
    received = torch.cat(exchange.exchange(*come, rows, receives))
    came_from = torch.arange(call.ranks).repeat_interleave(torch.tensor(receives))
    places = torch.cat(exchange.exchange(*come, [pair[:, None] for pair in pairs], receives))[:, 0]
    info = torch.stack([came_from, places // top_k, places % top_k], 1)
    # By sender, then by expert, as they came: bring them in the order of experts.
    expert_of = torch.cat([torch.arange(call.local).repeat_interleave(row) for row in mine])
    order = expert_of.argsort(stable=True)
    is_int8 = quant_mode == DYNAMIC
    expanded = torch.full(
        (call.rows, call.width),
        UNDEFINED_INT8 if is_int8 else float("nan"),
        dtype=torch.int8 if is_int8 else x.dtype,
    )
    expanded[: len(order)] = received[order]
    expanded_scales = None
    if is_int8:
        expanded_scales = torch.full((call.rows,), float("nan"))
        came = torch.cat(exchange.exchange(*come, row_scales, receives))
        expanded_scales[: len(order)] = came[order, 0]
    assist = torch.full((max(call.tokens * top_k, call.rows * INFO_OF_ROW),), -1, dtype=torch.int32)
    assist[: 3 * len(order)] = info[order].flatten().int()
    sizes = mine.sum(0)
    numbers = sizes if of.expert_token_nums_type else sizes.cumsum(0)
    ends = mine.t().flatten().cumsum(0).int()
    return expanded, expanded_scales, assist, numbers, ends, None, None


def combine(*given: Any, **named: Any) -> torch.Tensor:
    """Return the rows to their tokens and add them, weighted, to ``[BS, H]``."""
    of = _bind(COMBINE, given, named)
    expand_x, expert_ids, expert_scales = of.expand_x, of.expert_ids, of.expert_scales
    demand = Call("npu_moe_distribute_combine_v2", COMBINE).demand
    demand("dtype", expand_x.dtype in DTYPES, expand_x.dtype)
    demand("shape", expand_x.dim() == 2, shape_of(expand_x))
    call = _checked(demand, COMBINE, expand_x.shape[1], of)
    demand("rows", len(expand_x) == call.rows, f"{len(expand_x)}, A is {call.rows}")
    ok = expert_scales.dtype == torch.float32 and expert_scales.shape == expert_ids.shape
    demand("weights", ok, f"{expert_scales.dtype} {shape_of(expert_scales)}")
    demand("expand_scales", of.expand_scales is not None or _chip() == "A3", "none")
    assist, ends = of.assist_info_for_combine, of.ep_send_counts
    sizes = max(expert_ids.numel(), call.rows * INFO_OF_ROW), call.ranks * call.local
    ok = assist.dtype == ends.dtype == torch.int32 and (assist.numel(), ends.numel()) == sizes
    demand("of the dispatch", ok, f"{shape_of(assist)} and {shape_of(ends)}")
    number = int(ends[-1])
    info = assist[: 3 * number].view(-1, 3).long()
    sent = ends.diff(prepend=ends.new_zeros(1)).view(call.local, call.ranks).t().sum(1)
    came = torch.bincount(info[:, 0].clamp(min=0), minlength=call.ranks)
    ok = bool((info >= 0).all()) and torch.equal(came, sent.long())
    demand("counts of the dispatch", ok, f"{came.tolist()} rows, counts say {sent.tolist()}")

    parts = [expand_x[:number][info[:, 0] == rank] for rank in range(call.ranks)]
    pairs, top_k = call.pairs(), expert_ids.shape[1]
    place = call.group, KERNELS[COMBINE], call.rank
    received = exchange.exchange(*place, parts, [len(pair) for pair in pairs])
    active = len(call.ids)
    of_pair = torch.zeros(active * top_k, call.width)
    for pair, rows in zip(pairs, received):
        of_pair[pair[: len(rows)]] = rows.float()
    weights = faults.apply("weights of a combination", expert_scales[:active])
    total = (of_pair.view(active, top_k, call.width) * weights[..., None]).sum(1)
    output = torch.full((call.tokens, call.width), float("nan"), dtype=expand_x.dtype)
    output[:active] = total.to(expand_x.dtype)
    return output
