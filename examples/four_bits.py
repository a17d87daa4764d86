"""Weights of four bits, for `quantize.py`: how they are rounded, and what files say of them.

A weight is a number from 0 to 15. Groups of the inputs of an output channel have a scale and a zero
point, the number that stands for 0: 8 in symmetric groups.
"""

from typing import Any, NamedTuple

import torch

LEAST = torch.linspace(1, 0.7, 16)
"""Parts of a group's range that are tried; what lies outside becomes the first or last number."""
SIGNED = torch.cat([sign * torch.linspace(1.1, 0.7, 17) for sign in (1, -1)])
"""The same of symmetric groups whose scales may be negative: the larger end then becomes -8."""


class Rounded(NamedTuple):
    """A weight of N outputs and K inputs, in G groups of inputs."""

    numbers: torch.Tensor  # int32 [N, K]
    scale: torch.Tensor  # [N, G], in the weight's dtype
    zero: torch.Tensor | None  # int32 [N, G]; None if all are 8


def round_groups(
    weight: torch.Tensor,
    group: int,
    has_zeros: bool,
    name: str,
    squares: torch.Tensor | None = None,
    signed: bool = False,
) -> Rounded:
    """Round to nearest, with the scales that lose least; a group of 0 means all inputs.

    Parameters
    ----------
    squares
        The sum of squares of each input over a text, ``[K]``: with them, scales are those with
        which outputs lose least, and not weights.
    signed
        Whether scales of symmetric groups may be negative, so that the larger end becomes -8.

    Raises
    ------
    ValueError
        If the inputs are no whole number of groups.
    """
    outputs, inputs = weight.shape
    if group and inputs % group:
        raise ValueError(f"{name} has {inputs} inputs, no whole number of groups of {group}")
    rows = weight.float().view(outputs, -1, group or inputs)  # [N, G, group]
    low, high = rows.amin(2, keepdim=True).clamp(max=0), rows.amax(2, keepdim=True).clamp(min=0)
    if not has_zeros:
        high = high.maximum(-low)
        low = -high
    counts = torch.ones(inputs) if squares is None else squares
    counts = counts.view(1, -1, group or inputs)
    least = torch.full_like(high, torch.inf)
    numbers, scale = torch.zeros_like(rows), torch.zeros_like(high)
    zero = torch.full_like(high, 8)
    for part in SIGNED if signed and not has_zeros else LEAST:
        step = (part.abs() * (high - low) / 15).clamp(min=1e-6).to(weight.dtype).float()
        step = step * part.sign()
        start = (-part * low / step).round().clamp(0, 15) if has_zeros else zero
        tried = (rows / step + start).round().clamp(0, 15)
        error = (((tried - start) * step - rows).square() * counts).sum(2, keepdim=True)
        is_better = error < least
        least = torch.where(is_better, error, least)
        numbers, scale = torch.where(is_better, tried, numbers), torch.where(is_better, step, scale)
        zero = torch.where(is_better, start, zero)
    zeros = zero.flatten(1).int() if has_zeros else None
    return Rounded(numbers.flatten(1).int(), scale.flatten(1).to(weight.dtype), zeros)


def pack(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight numbers of a matrix along `dim` in an int32, the first in its lowest bits."""
    rows = numbers.movedim(dim, -1)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 8)).unflatten(-1, (-1, 8))
    words = (rows.long() << torch.arange(0, 32, 4)).sum(-1)
    return words.to(torch.int32).movedim(-1, dim)


def awq_order(numbers: torch.Tensor) -> torch.Tensor:
    """Columns in the order in which AWQ packs eight of them."""
    return numbers.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)


def tensors(form: str, module: str, rounded: Rounded, group: int) -> dict[str, torch.Tensor]:
    """What a file has of a module."""
    numbers, scale, zero = rounded
    if form == "modelslim":
        return modelslim_tensors(module, numbers - 8, scale.float(), group)
    if form in ("awq", "gptq"):
        made = {"scales": scale.t(), "qweight": pack(numbers.t(), 0)}
        if zero is None:  # GPTQ's files have zero points less 1
            made["qzeros"] = pack(torch.full_like(scale.t(), 7, dtype=torch.int32), 1)
            made["g_idx"] = torch.arange(numbers.shape[1]).int() // (
                numbers.shape[1] // scale.shape[1]
            )
        else:
            made |= {
                "qweight": pack(awq_order(numbers.t()), 1),
                "qzeros": pack(awq_order(zero.t()), 1),
            }
        return {f"{module}.{name}": tensor for name, tensor in made.items()}
    made = {
        "weight_packed": pack(numbers, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor(numbers.shape),
    }
    if zero is not None:
        made["weight_zero_point"] = pack(zero, 0)
    return {f"{module}.{name}": tensor for name, tensor in made.items()}


def modelslim_tensors(
    module: str, levels: torch.Tensor, scale: torch.Tensor, group: int
) -> dict[str, torch.Tensor]:
    """What ModelSlim's version 1.0.0 has: two outputs in a byte, and second scales of groups.

    Projections whose results ranks add up have biases of 16 parts of their inputs.
    """
    whole = scale.abs().amax(1, keepdim=True)
    parts = 16 if module.endswith(("o_proj", "down_proj")) else 1
    weights = levels * scale.repeat_interleave(levels.shape[1] // scale.shape[1], 1)
    made = {
        "weight": (levels[::2] & 15 | (levels[1::2] & 15) << 4).to(torch.uint8).view(torch.int8),
        "weight_scale": whole,
        "weight_offset": torch.zeros_like(whole),
        "scale_bias": 8 * weights.unflatten(1, (parts, -1)).sum(2),
    }
    if group:
        made["weight_scale_second"] = scale / whole
        made["weight_offset_second"] = torch.zeros_like(scale)
    return {f"{module}.{name}": tensor for name, tensor in made.items()}


def config_of(form: str, scheme: str, group: int, int8: dict[str, Any]) -> dict[str, Any]:
    """The ``quantization_config`` beside that of an int8 copy."""
    if form == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    if form == "gptq":
        sizes = {"bits": 4, "group_size": group or -1}
        return {"quant_method": "gptq", **sizes, "sym": True, "desc_act": False}
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": not scheme.endswith("_ASYM"),
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "dynamic": False,
    }
    of_int8 = int8.get("config_groups", {}).get("group_0", {})
    inputs = of_int8.get("input_activations") if scheme == "W4A8" else None
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {**int8, "format": "pack-quantized", "config_groups": groups}
