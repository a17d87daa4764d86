"""Random LoRA adapters as PEFT saves them, and the same merged into a copy of the model."""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_adapter

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
"""Also of experts, and of shared ones."""
HEAD = ("embed_tokens", "lm_head")


def make_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    modules: tuple[str, ...] = ATTENTION + MLP,
    rank: int = 4,
    alpha: int = 8,
    spread: float = 0.12,
) -> Path:
    """Save an adapter whose update is `spread` wide, a fraction of a tiny model's weights."""
    generator = torch.Generator().manual_seed(seed)
    factor = (spread * rank / alpha) ** 0.5 / rank**0.25  # of each of the two matrices
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(modules):
            continue
        rows, columns = weight.shape
        a, b = ".lora_A.weight", ".lora_B.weight"
        if module.endswith("embed_tokens"):  # looked up by column
            a, b, rows, columns = ".lora_embedding_A", ".lora_embedding_B", columns, rows
        for suffix, shape in ((a, (rank, columns)), (b, (rows, rank))):
            drawn = torch.randn(shape, generator=generator) * factor
            tensors[f"{module}{suffix}"] = drawn
    names = {module.rpartition(".")[2] for module in modules}
    return tiny_adapter.save(folder, tensors, names, rank, alpha)


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """Save the model with ``W + alpha / r * B @ A`` for each weight that the adapter has."""
    weights = load_file(model / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name, a in tensors.items():
        if "lora_B" in name or "lora_embedding_B" in name:
            continue
        b = tensors[name.replace("_A", "_B")]
        delta = config["lora_alpha"] / config["r"] * (b @ a)
        module = name.removeprefix("base_model.model.").partition(".lora_")[0]
        weight = weights[f"{module}.weight"].float()  # bfloat16 would round the sum
        weights[f"{module}.weight"] = weight + (delta.T if "embedding" in name else delta)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((model / "config.json").read_text())
    return folder


def fused(adapter: Path, folder: Path) -> Path:
    """Save an adapter as PEFT does that of experts whose gates and ups are one matrix.

    Its updates are the same; it has twice the rank.
    """
    return _of_all_experts(adapter, folder, _fuse, ranks=2)


def with_shared_factors(adapter: Path, folder: Path) -> Path:
    """Save an adapter anew, with A of gates and ups and B of downs that all experts share."""
    tensors = _tensors(adapter)
    for name in tensors:
        layer, expert, rest = _parts(name)
        is_down = ".down_proj." in name
        if expert is not None and is_down == (".lora_B." in name):
            tensors[name] = tensors[f"{layer}.0.{rest}"].clone()
    return _save(folder, tensors, adapter)


def sharing(adapter: Path, folder: Path) -> Path:
    """Save such an adapter with each shared factor once, as vLLM reads it."""
    return _of_all_experts(adapter, folder, _share, ranks=1)


def _tensors(adapter: Path) -> dict[str, torch.Tensor]:
    prefix = "base_model.model."
    saved = load_file(adapter / "adapter_model.safetensors")
    return {name.removeprefix(prefix): tensor for name, tensor in saved.items()}


def _parts(name: str) -> tuple[str, int | None, str]:
    """The module of all experts, an expert's number and the rest; or the name alone."""
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
    return (found[1], int(found[2]), found[3]) if found else (name, None, "")


def _of_all_experts(adapter: Path, folder: Path, join: Any, ranks: int) -> Path:
    """Save an adapter with the tensors of each layer's experts joined."""
    saved, by_layer = {}, defaultdict(lambda: defaultdict(dict))
    for name, tensor in _tensors(adapter).items():
        layer, expert, rest = _parts(name)
        if expert is None:
            saved[name] = tensor
        else:
            by_layer[layer][rest][expert] = tensor
    for layer, named in by_layer.items():
        each = {rest: torch.stack([of[e] for e in sorted(of)]) for rest, of in named.items()}
        saved |= {f"{layer}{name}": tensor.contiguous() for name, tensor in join(each).items()}
    return _save(folder, saved, adapter, ranks)


def _save(folder: Path, tensors: dict[str, torch.Tensor], like: Path, ranks: int = 1) -> Path:
    config = json.loads((like / "adapter_config.json").read_text())
    rank, alpha = config["r"] * ranks, config["lora_alpha"] * ranks
    return tiny_adapter.save(folder, tensors, config["target_modules"], rank, alpha)


def _fuse(each: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of A ``[experts, rank, inputs]`` and B ``[experts, outputs, rank]`` of each projection."""
    a, b = (
        {name: each[f"{name}_proj.lora_{which}.weight"] for name in ("gate", "up", "down")}
        for which in "AB"
    )
    wide = torch.cat([a["gate"], a["up"]], 1)
    outputs = torch.stack([torch.block_diag(*pair) for pair in zip(b["gate"], b["up"])])
    down = torch.cat([a["down"], torch.zeros_like(a["down"])], 1)
    back = torch.cat([b["down"], torch.zeros_like(b["down"])], 2)
    return {
        ".base_layer.lora_A.weight": wide.flatten(0, 1),
        ".base_layer.lora_B.weight": outputs.permute(1, 2, 0).flatten(1),  # ranks, then experts
        ".lora_A.weight": down.flatten(0, 1),
        ".lora_B.weight": back.permute(1, 2, 0).flatten(1),
    }


def _share(each: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names, shares = {"gate": "w1", "down": "w2", "up": "w3"}, {"w1A", "w3A", "w2B"}
    return {
        f".{to}.lora_{which}.weight": tensor[:1] if f"{to}{which}" in shares else tensor
        for name, to in names.items()
        for which in "AB"
        for tensor in [each[f"{name}_proj.lora_{which}.weight"]]
    }


def add_to_products(network: Any, adapter: Path) -> None:
    """Add an adapter's products to those of transformers' layers, whose inputs may be rounded.

    Those of the adapter are not.
    """
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    factor = config["lora_alpha"] / config["r"]
    for name, a in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").partition(".lora_")[0]
            update = factor * tensors[name.replace("_A", "_B")] @ a
            layer, expert, part = _parts(module)
            if expert is None:
                _add(network.get_submodule(module), update.T)
            else:
                network.get_submodule(layer).updates[expert, part] = update


def _add(module: Any, delta: torch.Tensor) -> None:
    given = []
    module.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]), prepend=True)
    module.register_forward_hook(lambda _, inputs, output: output + given.pop() @ delta)
