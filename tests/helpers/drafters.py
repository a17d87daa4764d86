"""Small drafters, which guess what a tiny random model says: now and then, or mostly."""

import json
import shutil
from pathlib import Path
from typing import Any

AUX_LAYERS = [0, 1]
"""What an EAGLE-3 head reads of a model with one layer: embeddings, and what the layer adds."""


def save_weights(weights: dict[str, Any], folder: Path) -> None:
    """Save weights as a checkpoint of one file."""
    from safetensors.torch import save_file

    weights = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def disturb_model(folder: Path, target: Path, share: float) -> Path:
    """Save a model whose weights are those of `target`, each off by about so much of itself.

    Of its drafts the target accepts some.
    """
    import torch
    from safetensors.torch import load_file

    shutil.copytree(target, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(target / "model.safetensors")
    for weight in weights.values():
        weight *= 1 + share * torch.randn(weight.shape, generator=generator)
    save_weights(weights, folder)
    return folder


def make_eagle_head(
    folder: Path, target: Path, method: str = "eagle", head_dim: int | None = None
) -> Path:
    """Save an EAGLE or EAGLE-3 head of one layer for a tiny model.

    Neither is trained. An EAGLE head's first projection is fitted to what `target` makes of the
    next token; its layer adds a little noise. In an EAGLE-3 head every token attends to itself and
    takes over its embedding, beside a little of the target's states. The more of a next token
    follows from the token before it alone (a large ``embedding_scale`` of `make_model`), the more
    of their drafts are accepted.

    Its four heads share out the hidden size, unless ``head_dim`` gives the size of each. That of an
    EAGLE-3 head is then the hidden size: each of its heads sees all of an embedding. It also
    has an ``lm_head``; an EAGLE head has none.
    """
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    config, generator = model.config, torch.Generator().manual_seed(0)
    hidden, heads = config.hidden_size, 4
    num_copies = 1 if head_dim is None else heads  # of an embedding, in the heads of EAGLE-3
    head_dim = head_dim or hidden // heads
    assert method != "eagle3" or heads * head_dim == num_copies * hidden

    def random(*shape: int, spread: float = 0.25) -> Any:
        return spread * torch.randn(shape, generator=generator)

    weights = {
        "layers.0.mlp.gate_proj.weight": random(2 * hidden, hidden),
        "layers.0.mlp.up_proj.weight": random(2 * hidden, hidden),
        "layers.0.mlp.down_proj.weight": random(hidden, 2 * hidden, spread=0.004),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
    }
    settings: dict[str, Any] = {}
    if method == "eagle3":
        of_embedding = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
        of_embedding = torch.cat([of_embedding] * num_copies)  # [heads x head_dim, 2 x hidden]
        weights |= {
            "layers.0.self_attn.q_proj.weight": 3 * of_embedding,  # most of all like itself
            "layers.0.self_attn.k_proj.weight": 3 * of_embedding,
            "layers.0.self_attn.v_proj.weight": of_embedding,
            "layers.0.self_attn.o_proj.weight": (
                torch.cat([torch.eye(hidden)] * num_copies, 1) / num_copies
            ),
            "layers.0.input_layernorm.weight": torch.ones(hidden),
            "layers.0.hidden_norm.weight": torch.ones(hidden),
            "norm.weight": torch.ones(hidden),
            "fc.weight": random(hidden, hidden * len(AUX_LAYERS), spread=0.001),
            "lm_head.weight": model.lm_head.weight.detach().clone(),
        }
        settings["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS}
    else:
        ids = torch.randint(4, config.vocab_size, (64, 48), generator=generator)
        with torch.no_grad():
            states = model.model(ids).last_hidden_state  # [64, 48, hidden]
            embeds = model.get_input_embeddings()(ids)
        seen = torch.cat([embeds[:, 1:], states[:, :-1]], dim=-1).flatten(0, 1)
        weights |= {
            "layers.0.self_attn.q_proj.weight": random(heads * head_dim, hidden),
            "layers.0.self_attn.k_proj.weight": random(heads * head_dim, hidden),
            "layers.0.self_attn.v_proj.weight": random(heads * head_dim, hidden),
            "layers.0.self_attn.o_proj.weight": random(hidden, heads * head_dim, spread=0.004),
            "fc.weight": torch.linalg.lstsq(seen, states[:, 1:].flatten(0, 1)).solution.T,
        }
    folder.mkdir(parents=True, exist_ok=True)
    llama = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=False,
        dtype="float32",
    )
    (folder / "config.json").write_text(json.dumps({**llama.to_dict(), **settings}))
    save_weights(weights, folder)
    return folder
