"""Lists of the calls of named models, recorded from their published configurations.

``models.json`` has the configurations and, for each list, the engine that made it. `README.md` says
where the configurations come from. ``python -m vllm_npu_prep.verify.calls.lists`` records all
lists, or those that are named, on the device of this process.
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

SETTINGS: dict[str, Any] = {
    "max_model_len": 32768,
    "num_gpu_blocks_override": 640,
    "max_num_batched_tokens": 8192,
}
"""Of each engine. There are blocks for 256 requests of a token, also where each has a state. vLLM
would choose the tokens of a step by the device's memory."""


def names() -> list[str]:
    return sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz"))


def path_of(name: str) -> Path:
    """Return the file of a list; it need not be there."""
    return FOLDER / f"{name}.jsonl.gz"


def engines() -> dict[str, dict[str, Any]]:
    """Return what each list is recorded of: ``config`` of the model, and ``settings``."""
    known = json.loads((FOLDER / "models.json").read_text())
    found = {}
    for name, given in known["lists"].items():
        whole, cut = known["models"][given["model"]], given.get("cut", {})
        config = {**whole, **cut}
        if given.get("w8a8"):
            config["quantization_config"] = known["w8a8"]
        found[name] = {"config": config, "settings": {**SETTINGS, **given.get("settings", {})}}
    return found
