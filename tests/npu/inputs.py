"""Prompts, adapters and drafters of engines on cards."""

from pathlib import Path

import numpy as np
from vllm.lora.request import LoRARequest

from tests.helpers.drafters import disturb_model, make_eagle_head
from tests.helpers.lora import ATTENTION, HEAD, MLP, make_adapter
from tests.npu.only_some import HEAD_SIZE

SEED = 20240607
LENGTHS = [5, 150, 33, 1, 70, 128, 129]
WINDOWED = [5, 290, 33, 150]
"""Lengths for models with windows, in most of which half of a shared prefix is in no window."""
ADAPTERS = {"lora-1": ATTENTION + MLP + HEAD, "lora-2": MLP, "lora-3": ATTENTION[:1]}
OF_PROMPTS = [1, 0, 2, 3, 0, 1, 2, 0]
"""Adapter of each prompt; 0: none."""


def prompts(lengths: list[int] = LENGTHS) -> list[list[int]]:
    """The last one shares full blocks of a prompt before it."""
    rng = np.random.default_rng(SEED)
    drawn = [rng.integers(2, 512, length).tolist() for length in lengths]
    return [*drawn, drawn[1][: lengths[1] // 128 * 128] + drawn[0]]


def drafts_of(model: Path, method: str) -> dict:
    """Settings of speculation; drafters are kept beside the model."""
    config: dict = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        config |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    elif method != "mtp":  # which are the model's own layers
        folder = model.with_name(f"{model.name}-{method}")
        if method == "draft_model" and not folder.exists():
            disturb_model(folder, model, share=0.05)
        elif not folder.exists():
            make_eagle_head(folder, model, method, head_dim=HEAD_SIZE)
        config["model"] = str(folder)
    return {"speculative_config": config}


def adapters_of(model: Path) -> list[LoRARequest | None]:
    """Adapter of each prompt, or none; they are kept beside the model."""
    requests: list[LoRARequest | None] = [None]
    for index, (name, modules) in enumerate(ADAPTERS.items(), 1):
        folder = model.with_name(f"{model.name}-{name}")
        if not folder.exists():
            make_adapter(folder, model, seed=index, modules=modules, rank=2 * index)
        requests.append(LoRARequest(name, index, str(folder)))
    return [requests[index] for index in OF_PROMPTS]
