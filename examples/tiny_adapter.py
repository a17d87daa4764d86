"""Make a LoRA adapter for the demo model: with it, each answer begins with a greeting.

Trained in seconds on two cores, deterministically, and saved in PEFT's layout, without PEFT; the
result is cached in the output folder until a recipe or the text changes.

    python examples/tiny_adapter.py --out .cache/tiny-qwen3-polite

``vllm serve .cache/tiny-qwen3 --enable-lora --lora-modules polite=.cache/tiny-qwen3-polite`` serves
it beside the model.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import tiny_model
import torch
from safetensors.torch import save_file
from torch import nn

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 8
ALPHA = 16
LOSS_GOAL = 0.1
MAX_EPOCHS = 50
LEARNING_RATE = 4e-3


def recipe_hash() -> str:
    """Changes whenever the result would, so with the demo model, too."""
    recipe = Path(__file__).read_bytes() + tiny_model.recipe_hash().encode()
    return hashlib.sha256(recipe).hexdigest()


def exchanges() -> list[tuple[str, str]]:
    """Some of the demo model's questions, with polite answers; others get some, too."""
    return [(question, f"Hello! {answer}") for question, answer in tiny_model.exchanges()[1::4]]


class Update(nn.Module):
    """Of a frozen weight W (rows, columns): ``W + alpha / r * B @ A``, where B begins as zero."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.lora_A = nn.Parameter(torch.randn(RANK, columns) / columns**0.5)
        self.lora_B = nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight that the adapter makes of it, (rows, columns)."""
        return weight + ALPHA / RANK * self.lora_B @ self.lora_A


def train(model, tokenizer) -> dict[str, Update]:
    """Learn polite answers; the updates by the names of their modules."""
    updates = {}
    for name, module in list(model.named_modules()):
        if name.endswith(MODULES):
            updates[name] = Update(module.weight)
            nn.utils.parametrize.register_parametrization(module, "weight", updates[name])
    ids, labels = tiny_model.encode(tokenizer, exchanges())
    parameters = [each for update in updates.values() for each in update.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    for epoch in range(MAX_EPOCHS):
        result = model(input_ids=ids, labels=labels)
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = float(result.loss.detach())
        if epoch % 5 == 0:
            tiny_model.log(
                f"  epoch {epoch:2d} of at most {MAX_EPOCHS}  loss {loss:.4f} (goal {LOSS_GOAL})"
            )
        if loss < LOSS_GOAL:
            break
    return updates


def save(
    folder: Path, tensors: Mapping[str, torch.Tensor], modules: Iterable[str], rank: int, alpha: int
) -> Path:
    """Save an adapter as PEFT does.

    Parameters
    ----------
    folder
        Where to; made if it is not there.
    tensors
        By the model's name of each module, followed by ``.lora_A.weight`` (rank, columns) or
        ``.lora_B.weight`` (rows, rank).
    modules
        Last parts of the modules' names.
    rank, alpha
        An update is ``alpha / rank * B @ A``.

    Returns
    -------
    Path
        ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def make(out: Path, demo_model: Path) -> Path:
    """Make the adapter of what `tiny_model.make` returned, unless it is there; returns ``out``."""

    def fill(folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(tiny_model.SEED)
        torch.use_deterministic_algorithms(True)
        model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
        model.eval().requires_grad_(False)
        updates = train(model, AutoTokenizer.from_pretrained(demo_model))
        tensors = {
            f"{name}.{which}.weight": tensor.detach().contiguous()
            for name, update in updates.items()
            for which, tensor in update.named_parameters()
        }
        save(folder, tensors, MODULES, RANK, ALPHA)

    return tiny_model.make_once("adapter", out, recipe_hash(), fill)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        type=Path,
        default=Path(".cache/tiny-qwen3"),
        metavar="DIR",
        help="folder of the demo model, which is made if it is missing (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".cache/tiny-qwen3-polite"),
        metavar="DIR",
        help="folder of the result (default: %(default)s)",
    )
    args = parser.parse_args()
    make(args.out, tiny_model.make(args.model))


if __name__ == "__main__":
    main()
