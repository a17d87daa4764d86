"""Quantised copies of tiny models, and what transformers makes of their weights and inputs.

transformers doesn't compute with int8. It runs the model with dequantised weights, and a hook
rounds the inputs of each quantised layer: the same arithmetic in float32.
"""

import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import four_bits
import quantize

from tests.helpers.four_bits import numbers_in, rounds_inputs, weight_in
from tests.helpers.huggingface import load
from tests.helpers.mtp import PlainDrafter

QUANTIZE = partial(quantize.quantize, plain=True)
OLD_NAMES = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}
LAST = ("weight_scale", "weight_offset", "input_scale", "input_offset", "deq_scale", "quant_bias")


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Write a checkpoint of one file again after a change of its tensors."""
    from safetensors.torch import save_file

    (path,) = folder.glob("*.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors_in(folder).items()}
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})


def negate_scales(tensors: dict[str, torch.Tensor]) -> None:
    """Give every other scale of compressed-tensors' symmetric words the other sign.

    Tools choose signs so that the larger end of a group gets -8.
    """
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        module = name.removesuffix("packed")
        if f"{module}zero_point" in tensors:
            continue
        levels, scale = torch.from_numpy(numbers_in(tensors[name]) - 8), tensors[f"{module}scale"]
        signs = 1 - 2 * (torch.arange(scale.numel()) % 2).view(scale.shape)
        levels = levels * signs.repeat_interleave(levels.shape[1] // scale.shape[1], 1)
        tensors[name] = four_bits.pack(levels.clamp(max=7) + 8, 1)
        tensors[f"{module}scale"] = scale * signs


def quantize_with_signs(model: Path, folder: Path, **how: Any) -> None:
    """Write a copy with negative scales among others, where its format has words."""
    QUANTIZE(model, folder, **how)
    change_tensors(folder, negate_scales)


def quantize_to_bytes(model: Path, folder: Path, **how: Any) -> None:
    """Write W4A8 as llm-compressor does: levels of four bits in int8, a byte each."""

    def unpack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            weight = name.removesuffix("_packed")
            levels = numbers_in(tensors.pop(name)) - 8
            tensors[weight] = torch.from_numpy(levels).to(torch.int8)
            del tensors[f"{weight}_shape"]

    QUANTIZE(model, folder, "compressed-tensors", scheme="W4A8", **how)
    change_tensors(folder, unpack)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format"] = "int-quantized"
    (folder / "config.json").write_text(json.dumps(config))


def draw_biases(tensors: dict[str, torch.Tensor]) -> None:
    """Change the biases of Q, K and V, which are 0 in new models, of two layers."""
    generator = torch.Generator().manual_seed(0)
    biases = [name for name in tensors if name.endswith("_proj.bias")]
    assert len(biases) == 6
    for name in biases:
        tensors[name] = torch.randn(tensors[name].shape, generator=generator)


def draw_norms(tensors: dict[str, torch.Tensor]) -> None:
    """Change the weights of norms, which are 0 or 1 in new models."""
    generator = torch.Generator().manual_seed(0)
    norms = [name for name in tensors if name.endswith("norm.weight")]
    assert len(norms) > 8
    for name in norms:
        tensors[name] = torch.empty(tensors[name].shape).uniform_(-0.5, 0.5, generator=generator)


def rounded_tokens(x: torch.Tensor, slices: int = 1) -> torch.Tensor:
    """Inputs after a scale for each token: 255 values, the largest magnitude kept.

    With several ranks, each rounds its slice of the inputs of a layer whose results they add up.
    """
    parts = x.unflatten(-1, (slices, -1))
    step = parts.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, torch.round(parts / step) * step, parts).flatten(-2)


def rounded_all(x: torch.Tensor, step: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Inputs after one scale and offset, cut off at the ends of int8."""
    levels = (torch.round(x / step) + offset).clamp(-128, 127)
    return (levels - offset) * step


SUMMED = ("o_proj", "out_proj", "down_proj")
"""Projections that tensor parallelism cuts by their inputs; ranks add up the results."""


def rounded_model(model: Path, int8: Path, ranks: int = 1, expert_ranks: int = 1) -> Any:
    """transformers' model of a float checkpoint, as its int8 copy computes on so many ranks.

    Each of `expert_ranks` has a part of each expert; 1 if ranks have experts as a whole.
    """
    network = load(model, experts_implementation="eager")
    rounds = rounds_inputs(int8)
    round_modules(network, tensors_in(int8), "", ranks, expert_ranks, rounds)
    return network


def rounded_drafter(model: Path, int8: Path, drafter: PlainDrafter) -> PlainDrafter:
    """The plain reading of an MTP layer, as the int8 copy of its model computes."""
    rounded = copy.deepcopy(drafter)
    rounded.target = rounded_model(model, int8)
    prefix = f"model.layers.{rounded.target.config.num_hidden_layers}."
    if drafter.is_qwen:
        prefix = "mtp.layers.0."
    elif drafter.is_mimo:
        prefix = "model.mtp_layers.0."
    round_modules(rounded.block, tensors_in(int8), prefix, int4_rounds=rounds_inputs(int8))
    return rounded


def round_modules(
    network: Any,
    tensors: dict[str, torch.Tensor],
    prefix: str = "",
    ranks: int = 1,
    expert_ranks: int = 1,
    int4_rounds: bool = False,
) -> None:
    """Let those of a model's modules that a checkpoint has in int8 compute as the copy does."""
    tensors = {_in_transformers(name): tensor for name, tensor in tensors.items()}
    for name, module in network.named_modules():
        name = prefix + name
        if (weight := weight_in(tensors, name)) is not None:
            module.weight.data = weight
            if int4_rounds and not name.endswith(".kv_b_proj"):
                slices = ranks if name.endswith(SUMMED) else 1
                module.register_forward_pre_hook(_rounds(None, None, slices))
            continue
        scale = tensors.get(f"{name}.weight_scale")
        if scale is not None:
            module.weight.data = tensors[f"{name}.weight"].float() * scale.float()
            if name.endswith(".kv_b_proj"):  # dequantised when the engine loads it
                continue
            step = tensors.get(f"{name}.input_scale")
            offset = tensors.get(f"{name}.input_offset", tensors.get(f"{name}.input_zero_point"))
            total = tensors.get(f"{name}.quant_bias")
            if total is not None and module.bias is not None:  # in whole units of both scales
                assert step is not None and offset is not None
                sums = tensors[f"{name}.weight"].sum(1, dtype=torch.int32)
                module.bias.data = (total + offset.int() * sums) * (step * scale.flatten())
            slices = ranks if name.endswith(SUMMED) else 1
            module.register_forward_pre_hook(_rounds(step, offset, slices))
        elif name.endswith("norm") and f"{name}.weight" in tensors:  # smoothing changes it
            module.weight.data = tensors[f"{name}.weight"].float()
        elif any(f"{name}.0.gate_proj.{scale}" in tensors for scale in ("weight_scale", "scales")):
            int4 = weight_in(tensors, f"{name}.0.gate_proj") is not None
            rounds = rounded_tokens if int4_rounds or not int4 else lambda x, slices=1: x
            _round_experts(module, name, tensors, expert_ranks, rounds)


def _in_transformers(name: str) -> str:
    """What transformers calls a tensor of a file: Mixtral's and MiniMax's files have old names."""
    for old, new in OLD_NAMES.items():
        name = name.replace(old, new)
    return name


def _rounds(
    step: torch.Tensor | None, offset: torch.Tensor | None, slices: int
) -> Callable[..., Any]:
    if step is None:
        return lambda module, inputs: (rounded_tokens(inputs[0], slices), *inputs[1:])
    start = torch.zeros(1) if offset is None else offset.float()
    return lambda module, inputs: (rounded_all(inputs[0], step, start), *inputs[1:])


def _round_experts(
    module: Any,
    name: str,
    tensors: dict[str, torch.Tensor],
    slices: int,
    rounds: Callable[..., torch.Tensor],
) -> None:
    """Let a module of fused experts compute with rounded weights and inputs, one by one.

    `tests.helpers.lora.add_to_products` adds to its ``updates``.
    """
    weights = {}
    for expert in range(module.num_experts):
        for part in ("gate_proj", "up_proj", "down_proj"):
            key = f"{name}.{expert}.{part}"
            weight = weight_in(tensors, key)
            if weight is None:
                weight = tensors[f"{key}.weight"].float() * tensors[f"{key}.weight_scale"].float()
            weights[expert, part] = weight

    def product(expert: int, part: str, rounded: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        result = weights[expert, part] @ rounded
        update = module.updates.get((expert, part))
        return result if update is None else result + update @ given

    def forward(
        hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(hidden_states)
        for token, (ids, factors) in enumerate(zip(top_k_index, top_k_weights)):
            given = hidden_states[token]
            x = rounds(given)
            for expert, factor in zip(ids.tolist(), factors):
                gate = product(expert, "gate_proj", x, given)
                up = product(expert, "up_proj", x, given)
                hidden = torch.nn.functional.silu(gate) * up
                rounded = rounds(hidden, slices)
                total[token] += factor * product(expert, "down_proj", rounded, hidden)
        return total

    module.updates, module.forward = {}, forward
