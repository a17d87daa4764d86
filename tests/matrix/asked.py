"""What start-up says to a model with a feature: the refusals, vLLM's own error, or nothing.

The check itself is asked, with the configuration that vLLM makes; only devices that aren't here are
stood in for, as in `tests/startup`.
"""

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.engine import engine_config
from tests.helpers.v2 import asked_for
from tests.matrix.cells import DRAFTER, EMULATED, FEATURES, QUANTISED
from tests.startup.npus import NPUS
from vllm_npu_prep import device, platform
from vllm_npu_prep.attention.families import KERNEL_FAMILIES
from vllm_npu_prep.startup.refusals import refusals_that_apply

W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
"""What `config.json` says of a model with int8 weights, whose inputs are rounded token by token."""


OTHERS = {
    **NPUS,
    "vllm_npu_prep.startup.subjects.ranks.visible_devices": {"npu": 8, "cpu": 8}.get,
}
"""A host with more NPUs than any feature asks for."""
VISION = Path(__file__).parents[2] / ".cache" / "tiny-vision"
"""Models that see, as `tests.conftest.vision_models` makes them: start-up asks their processors."""


class _Told(Exception):  # noqa: N818
    """Ends start-up where it has refused what it refuses."""


def answer(model: dict[str, Any], feature: str, device_name: str, runner: str) -> dict[str, Any]:
    """Ask start-up for an engine of a model's ``config.json`` with a feature.

    Returns ids of the refusals, or the first line of vLLM's own error, or nothing, if both would
    start it.
    """
    asked = next(each.asked for each in FEATURES if each.name == feature)
    if asked is None:
        return {}
    config, settings = dict(model), json.loads(json.dumps(asked))
    if settings.pop(QUANTISED, False):
        config["quantization_config"] = W8A8
    on_npu = device_name == EMULATED
    base: dict[str, Any] = {"enforce_eager": True, "dtype": "bfloat16" if on_npu else "float32"}
    if block := config.get("attention_chunk_size"):
        base["block_size"] = block
    if "speculative_config" in settings or "kv_transfer_config" in settings:
        base["enable_prefix_caching"] = False  # with which models that have states refuse both
    found: list[str] = []

    def refuse(vllm_config: Any, family: Any, kind: Any) -> None:
        if on_npu:
            family, kind = KERNEL_FAMILIES["fia"], device.NPU_KIND
        found.extend(refusals_that_apply(vllm_config, family, kind))
        raise _Told

    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as patches:
        folder = Path(root) / "model"
        _processor(folder, config)
        (folder / "config.json").write_text(json.dumps(config))
        if (speculative := settings.get("speculative_config", {})).get("model") == DRAFTER:
            speculative["model"] = str(_drafter(Path(root) / "drafter", config))
        for target, value in OTHERS.items() if on_npu else ():
            patches.enter_context(mock.patch(target, value))
        patches.enter_context(mock.patch.object(platform, "refuse_unsupported", refuse))
        patches.enter_context(asked_for(runner))
        try:
            engine_config(folder, **{**base, **settings})
        except _Told:
            return {"refused": found} if found else {}
        except Exception as error:
            if (told := _line_of(error)) == "":  # pydantic wraps what a validator raises
                return {"refused": found} if found else {}
            return {"error": told.replace(str(root), "")}
    raise AssertionError("start-up did not ask what to refuse")


def _line_of(error: Exception) -> str:
    """The line of an error that says what is wrong; empty for `_Told` in another's clothes."""
    if isinstance(error.__cause__ or error.__context__, _Told) or "_Told" in str(error):
        return ""
    text = str(error)
    value = re.search(r"(?:Value error|Assertion failed), (.*?)(?:\[type=|\n|$)", text)
    line = value.group(1) if value else (text.strip().splitlines() or [""])[0]
    return " ".join(line.split()) or type(error).__name__


def _processor(folder: Path, config: dict[str, Any]) -> None:
    """Make a model's folder, with what its processor needs if it sees."""
    folder.mkdir()
    for other in VISION.glob("*/config.json"):
        if json.loads(other.read_text())["architectures"] == config.get("architectures"):
            for file in other.parent.iterdir():
                if file.is_file() and file.suffix != ".safetensors":
                    shutil.copy(file, folder)


def _drafter(folder: Path, model: dict[str, Any]) -> Path:
    """A drafter's folder, without weights: one dense layer of the model's vocabulary and width."""
    import transformers

    text = model.get("text_config", model)
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=text.get("vocab_size", 512),
        hidden_size=text.get("hidden_size", 64),
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        dtype="float32",
    ).to_dict()
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answers(
    model: dict[str, Any], features: Iterable[str], device_name: str, runner: str
) -> dict[str, dict[str, Any]]:
    """`answer` to each of several features."""
    return {feature: answer(model, feature, device_name, runner) for feature in features}
