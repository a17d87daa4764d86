"""Random LoRA adapters as PEFT saves them, and the same merged into a copy of the model."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_adapter

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
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
            b = tensors[name.replace("_A", "_B")]
            _add(network.get_submodule(module), factor * a.T @ b.T)


def _add(module: Any, delta: torch.Tensor) -> None:
    given = []
    module.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]), prepend=True)
    module.register_forward_hook(lambda _, inputs, output: output + given.pop() @ delta)
