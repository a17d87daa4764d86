"""Models that decide clearly: small differences of rounding don't change which token follows.

Logits of random weights lie close together: of a hundred greedy steps, some have two first choices
that float16 can't tell apart. Here the head of a model learns the tokens that the model chooses by
itself, until each leads by a margin. The layers before it stay as they are, so whatever goes wrong
in them by more than the margin still shows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HEADS = ("lm_head.weight", "shared_head.head.weight")
"""Names of a head's weights end so: the second are a copy in MTP layers."""

ROUNDS = 5000


@torch.no_grad()
def decide_clearly(
    network: Any, prompts: Sequence[list[int]], num_tokens: int, margin: float, *folders: Path
) -> None:
    """Change the head of a model so that each greedy token leads by a margin.

    Parameters
    ----------
    network
        transformers' model, whose head isn't tied to its embeddings; changed, too.
    prompts, num_tokens
        What the model is asked.
    margin
        In standard deviations of a step's logits.
    folders
        Of checkpoints with this head, which are written again.

    Raises
    ------
    AssertionError
        If the head does not learn it.
    """
    states, chosen = [], []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(num_tokens):
            seen = network.model(torch.tensor([tokens]))[0][0, -1]
            states.append(seen)
            tokens.append(int(network.lm_head(seen).argmax()))
            chosen.append(tokens[-1])
    rows, wanted = torch.stack(states).float(), torch.tensor(chosen)
    weight, steps = network.lm_head.weight, torch.arange(len(rows))
    for _ in range(ROUNDS):
        logits = rows @ weight.T
        others = logits.scatter(1, wanted[:, None], float("-inf")).max(1)
        lead = (logits[steps, wanted] - others.values) / logits.std(1)
        if lead.min() >= margin:
            break
        missing = (1.2 * margin - lead).clamp(min=0) * (lead < margin) * logits.std(1)
        change = missing[:, None] * rows / (2 * rows.square().sum(1, keepdim=True))
        weight.index_add_(0, wanted, change)
        weight.index_add_(0, others.indices, -change)
    assert lead.min() >= margin, f"{lead.min():.2f} after {ROUNDS} rounds"
    for folder in folders:
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            heads = [name for name in tensors if name.endswith(HEADS)]
            for name in heads:
                tensors[name] = weight.to(tensors[name].dtype).clone()
            save_file(tensors, file, metadata={"format": "pt"})
