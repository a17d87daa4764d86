"""What a prompt of many tokens has to give, and the memory that it may take."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.long_context import TOKENS, measured, prompt_of


def check_bound(llm: Any, longest: int) -> dict[str, Any]:
    """Run a prompt of this length, and hold its memory against the bound of start-up."""
    row = measured(llm, longest)
    print("long context", row)
    # On a host it may be nothing, if pages that the process has suffice
    assert row["peak_bytes"] <= row["bound_bytes"]
    assert row["bound_bytes"] < longest * longest, "a byte for each pair, as a dense mask has"
    return row


@torch.no_grad()
def expected_tokens(folder: Path, longest: int) -> list[int]:
    """Greedy tokens of transformers, in linear time: of one layer, keys need no attention."""
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (layer,), ids = model.model.layers, torch.tensor([prompt_of(longest)])
    context, last = ids[:, :-1], ids[:, -1:]
    attention, size = layer.self_attn, layer.self_attn.head_dim
    rows = layer.input_layernorm(model.model.embed_tokens(context))
    key = attention.k_norm(attention.k_proj(rows).unflatten(-1, (-1, size))).transpose(1, 2)
    value = attention.v_proj(rows).unflatten(-1, (-1, size)).transpose(1, 2)
    cos, sin = model.model.rotary_emb(rows, torch.arange(context.shape[1])[None])
    cache = DynamicCache()
    cache.update(apply_rotary_pos_emb(key, key, cos, sin)[1], value, 0)
    tokens: list[int] = []
    while len(tokens) < TOKENS:
        logits = model(input_ids=last, past_key_values=cache).logits
        last = logits[:, -1:].argmax(-1)
        tokens.append(int(last))
    return tokens
