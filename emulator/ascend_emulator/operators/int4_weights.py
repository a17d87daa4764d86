"""Products of int8 rows and weights of four bits: of matrices, and of rows that are grouped.

Both kernels multiply the upper and the lower four bits of a row one after the other. A row is
``16 * upper + lower + 8``, both from -8 to 7, so what the 8 adds is given to them: 8 times the sum
of each output's scaled weights. Scales are the bits of float32 in int64, of which they read the
upper 19; the 32 bits above them are 0. Sums within a group of inputs are exact; scaled, they are
float16, and so is their total.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.constraint import Call, shape_of
from ascend_emulator.operators.matmul import int4_values

HALF = (torch.float16, torch.bfloat16)
GROUP = 256
UNIT = 64
"""Inputs are a multiple of it in the grouped product, by channel, too."""
MOST_INPUTS = {"8.5": 18432, "9.1": 29576}
"""Of a matrix; grouped products take 18,432 in all releases."""
READ_BITS = ~0x1FFF


def product(
    values: torch.Tensor,  # int8 [m, k]
    levels: torch.Tensor,  # int8 [k, n], from -8 to 7
    scales: torch.Tensor,  # int64 [G, n]
    added: torch.Tensor,  # float32 [n]
    tokens: torch.Tensor,  # float32 [m]
) -> torch.Tensor:
    """Return ``[m, n]`` in float32, as the kernels compute it."""
    bits = (scales & 0xFFFFFFFF & READ_BITS).to(torch.int64)
    factors = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    size = len(levels) // len(scales)
    columns = levels.float().unflatten(0, (len(scales), size))
    halves = []
    for part in (values >> 4, (values & 15) - 8):
        total = torch.zeros(len(values), levels.shape[1], dtype=torch.float16)
        rows = part.float().unflatten(1, (len(scales), size))
        for group, factor in enumerate(factors.view(torch.float32)):
            total = total + ((rows[:, group] @ columns[group]) * factor).half()
        halves.append(total.float())
    upper, lower = halves
    return (16 * upper + lower + added) * tokens[:, None]


def quant_matmul(
    call: Call,
    x1: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    result: torch.dtype | None,
    given: Mapping[str, Any],  # all other arguments
) -> torch.Tensor:
    """Multiply rows by packed weights, with scales by channel or of groups of inputs."""
    call.demand("dtype", x1.dtype == torch.int8, x1.dtype)
    taken = ("offset", "pertoken_scale", "group_sizes")
    others = [name for name, value in given.items() if value is not None and name not in taken]
    call.demand("form", not others, others)
    call.demand("result", result in HALF, result)
    dense = x1.is_contiguous() and words.is_contiguous()
    call.demand("contiguous", dense, f"strides {x1.stride()} and {words.stride()}")
    fits = x1.dim() == words.dim() == 2 and x1.shape[1] == words.shape[0]
    call.demand("shapes", fits, f"{shape_of(x1)} and {shape_of(words)}")
    (m, k), n, release = x1.shape, words.shape[1] * 8, profiles.current().release
    sizes, tokens = [*(given["group_sizes"] or ())], given["pertoken_scale"]
    by_channel = scale.dim() == 1
    call.demand("channels of 8.5", release != "8.5" or not by_channel, shape_of(scale))
    wanted = ([], [0, 0, 0]) if by_channel else ([0, 0, GROUP],)
    told = f"group_sizes {sizes}, k = {k}, scales {shape_of(scale)}"
    call.demand("groups", sizes in wanted and k % (2 if by_channel else GROUP) == 0, told)
    shape = (n,) if by_channel else (k // GROUP, n)
    fits = shape_of(scale) == shape and scale.dtype == torch.int64
    call.demand("scale", fits, f"{shape_of(scale)} {scale.dtype} for n = {n}")
    _demand_zeros(call, scale)
    _demand_floats(call, "token scale", tokens, (m,) if by_channel else (m, 1))
    _demand_floats(call, "offset", given["offset"], (n,))
    call.demand("inner limit", k <= MOST_INPUTS[release], k)
    values = product(x1, int4_values(words), scale.view(-1, n), given["offset"], tokens.flatten())
    return values.to(result)


def check_grouped(
    call: Call, rows: torch.Tensor, words: torch.Tensor, given: Mapping[str, Any]
) -> None:
    """Demand what grouped products of int8 rows and packed weights take, beside their groups."""
    call.demand("words", words.dim() == 3 and words.is_contiguous(), shape_of(words))
    groups, k, n = len(words), words.shape[1], words.shape[2] * 8
    fits = rows.dim() == 2 and rows.shape[1] == k
    call.demand("shapes", fits, f"{shape_of(rows)} and {shape_of(words)}")
    call.demand("contiguous", rows.is_contiguous(), f"strides {rows.stride()}")
    call.demand("inputs", k % UNIT == 0 and k <= MOST_INPUTS["8.5"], k)
    scales, added, tokens = (
        [*(given.get(name) or ())][:1] for name in ("scale", "bias", "per_token_scale")
    )
    shapes = [(groups, count, n) for count in {1, k // GROUP if k % GROUP == 0 else 1}]
    fits = [each.dtype for each in scales] == [torch.int64] and shape_of(scales[0]) in shapes
    call.demand("scale", fits, [f"{shape_of(each)} {each.dtype}" for each in scales])
    _demand_zeros(call, scales[0])
    _demand_floats(call, "bias", next(iter(added), None), (groups, n))
    _demand_floats(call, "token scale", next(iter(tokens), None), (len(rows),))


def _demand_zeros(call: Call, scale: torch.Tensor) -> None:
    call.demand("upper halves", not (scale >> 32).any(), "other bits there")


def _demand_floats(
    call: Call, name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]
) -> None:
    told = None if tensor is None else f"{shape_of(tensor)} {tensor.dtype}"
    fits = tensor is not None and shape_of(tensor) == shape and tensor.dtype == torch.float32
    call.demand(name, fits, told)
