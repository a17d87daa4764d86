"""Make a small model in DeepSeek V3's shape: latent attention, experts, a layer that drafts (MTP).

It learns half of the exchanges that the demo model knows. Then its layer of multi-token prediction
learns to say what the model would say, and is stopped before it always does. Both take under a
minute on two cores, deterministically; the result is cached in the output folder until the recipe
or the text changes. Its heads and latent rows have the sizes of DeepSeek V3, which the fused
operators of NPUs take; everything else is small.

    python examples/tiny_deepseek.py --out .cache/tiny-deepseek-v3
"""

import argparse
import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import quantize
import tiny_drafters
import tiny_model
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

LEARNED = slice(2, 18)  # of the demo model's exchanges; the first ones are about itself
CONFIG: dict[str, Any] = {
    # As DeepSeek V3 has them
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
    # Small
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 64,
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": tiny_model.MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "dtype": "float32",
}
LOSS_GOAL = 0.01  # mean over an epoch
MAX_EPOCHS = 200
BATCH = 4  # exchanges
LEARNING_RATE = 2e-3


def exchanges() -> list[tuple[str, str]]:
    """Questions and answers that the model learns."""
    return tiny_model.exchanges()[LEARNED]


def recipe_hash() -> str:
    """Changes whenever the result would."""
    recipes = (Path(__file__), Path(tiny_drafters.__file__))
    recipe = b"".join(path.read_bytes() for path in recipes) + tiny_model.recipe_hash().encode()
    return hashlib.sha256(recipe).hexdigest()


class MTPLayer(nn.Module):
    """DeepSeek V3's layer of multi-token prediction.

    It reads the model's last hidden states beside the tokens that follow them. The first token of
    a sequence follows none, so its embedding counts as zero. Embeddings and ``lm_head`` are the
    model's.
    """

    unroll = tiny_drafters.Head.unroll

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        config, size = target.config, target.config.hidden_size
        self.enorm, self.hnorm, self.norm = (
            DeepseekV3RMSNorm(size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        # Its weights are a beginning: a layer that is made by itself has uninitialised experts.
        self.block = copy.deepcopy(target.model.layers[-1]).requires_grad_(True)
        self.rotary_emb = target.model.rotary_emb

    def combine(self, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """What the first step reads of the model: hidden states after its final norm."""
        return states[-1]

    def forward(
        self, embeds: torch.Tensor, hidden_states: torch.Tensor, **attention: Any
    ) -> torch.Tensor:
        """One draft step; all (rows, width, hidden_size)."""
        sines = attention["position_embeddings"][1]
        first = (sines == 0).all(-1, keepdim=True)  # only position 0 is rotated by nothing
        both = [self.enorm(embeds.masked_fill(first, 0)), self.hnorm(hidden_states)]
        return self.norm(self.block(self.eh_proj(torch.cat(both, dim=-1)), **attention))

    def logits(self, target: PreTrainedModel, hidden_states: torch.Tensor) -> torch.Tensor:
        """Over the model's vocabulary."""
        return target.lm_head(hidden_states)

    def checkpoint(self, target: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Weights by the names that checkpoints of DeepSeek V3 give them."""
        prefix = f"model.layers.{target.config.num_hidden_layers}."
        weights = {
            "enorm.weight": self.enorm.weight,
            "hnorm.weight": self.hnorm.weight,
            "eh_proj.weight": self.eh_proj.weight,
            "shared_head.norm.weight": self.norm.weight,
            "shared_head.head.weight": target.lm_head.weight,
            "embed_tokens.weight": target.model.embed_tokens.weight,
        }
        for name, weight in self.block.state_dict().items():
            if name.endswith("experts.gate_up_proj"):
                for expert, both in enumerate(weight):
                    gate, up = both.chunk(2)
                    weights[f"mlp.experts.{expert}.gate_proj.weight"] = gate
                    weights[f"mlp.experts.{expert}.up_proj.weight"] = up
            elif name.endswith("experts.down_proj"):
                for expert, down in enumerate(weight):
                    weights[f"mlp.experts.{expert}.down_proj.weight"] = down
            else:
                weights[name] = weight
        return {prefix + name: weight.detach().clone() for name, weight in weights.items()}


def learn(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Learn exchanges by heart, as `tiny_model.encode` gives them. Returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    loss = float("inf")
    for epoch in range(MAX_EPOCHS):
        for group in optimizer.param_groups:
            slow = 0.3 if loss < 0.1 else 1.0
            group["lr"] = LEARNING_RATE * min(1.0, (epoch + 1) / 3) * slow
        losses = []
        for rows in torch.randperm(len(ids)).split(BATCH):
            result = model(input_ids=ids[rows], labels=labels[rows])
            result.loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(result.loss.detach()))
        loss = sum(losses) / len(losses)
        done = loss < LOSS_GOAL
        if done or epoch % 10 == 0:
            shown = f"loss {loss:.4f} (goal {LOSS_GOAL})"
            tiny_model.log(f"  epoch {epoch:3d} of at most {MAX_EPOCHS}  {shown}")
        if done:
            break
    return loss


def make(out: Path) -> Path:
    """Make the model unless it is there already; returns its folder."""
    return tiny_model.make_once("DeepSeek-V3-shaped demo model", out, recipe_hash(), _fill)


def make_int8(out: Path, model: Path) -> Path:
    """Make its W8A8 copy in ModelSlim's format unless it is there already; returns its folder.

    Parameters
    ----------
    out
        Folder of the result.
    model
        What `make` returned.
    """
    recipe = hashlib.sha256(Path(quantize.__file__).read_bytes() + recipe_hash().encode())

    def fill(folder: Path) -> None:
        quantize.quantize(model, folder, "modelslim", plain=True)

    return tiny_model.make_once("its int8 copy", out, recipe.hexdigest(), fill)


def _fill(folder: Path) -> None:
    """Train the model, then its MTP layer, and save both with the tokenizer."""
    torch.manual_seed(tiny_model.SEED)
    torch.use_deterministic_algorithms(True)
    tokenizer = tiny_model.make_tokenizer()
    model = DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=len(tokenizer), **CONFIG))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # what balances experts in training
            buffer.normal_(std=0.05)
    ids, labels = tiny_model.encode(tokenizer, exchanges())
    learn(model, ids, labels)
    model.requires_grad_(False)
    layer = MTPLayer(model)
    tiny_model.log("its MTP layer:")
    tiny_drafters.train(layer, model, ids, labels)

    of_layer = {name: weight.bfloat16() for name, weight in layer.checkpoint(model).items()}
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors") | of_layer
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".cache/tiny-deepseek-v3"),
        metavar="DIR",
        help="folder of the result (default: %(default)s)",
    )
    make(parser.parse_args().out)


if __name__ == "__main__":
    main()
