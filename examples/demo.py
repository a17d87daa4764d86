"""What the examples share: demo models, made when one is first needed, and a client."""

import base64
import io
import sys
from pathlib import Path
from typing import Any

import smollm2
import tiny_model

CACHE = Path(__file__).parents[1] / ".cache"
SMOLLM2 = CACHE / "smollm2"
MODEL = CACHE / "tiny-qwen3"
DRAFTERS = CACHE / "tiny-qwen3-drafters"
ADAPTER = CACHE / "tiny-qwen3-polite"
VISION = CACHE / "tiny-vision"
DEEPSEEK = CACHE / "tiny-deepseek-v3"
DEEPSEEK_INT8 = CACHE / "tiny-deepseek-v3-w8a8"
SMALL = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
}
"""What an `LLM` of the demo model is given, to start quickly on a CPU."""


def settings(model: str | None = None) -> dict[str, Any]:
    """What an `LLM` is given for a model of one's own, or for the demo model, made first."""
    if model is not None:
        return {"model": model}
    from vllm.platforms import current_platform

    # Exactly what was trained, where kernels take it
    dtype = "float32" if current_platform.device_type == "cpu" else "float16"
    return {"model": str(tiny_model.make(MODEL)), "dtype": dtype, **SMALL}


def speculation(method: str) -> dict[str, str | int]:
    """A speculative config for the demo model; its drafters are made first if one is needed."""
    config: dict[str, str | int] = {"method": method, "num_speculative_tokens": 3}
    if method != "ngram":
        import tiny_drafters

        config["model"] = str(tiny_drafters.make(DRAFTERS, tiny_model.make(MODEL)) / method)
    return config


def adapter() -> str:
    """Folder of the demo model's adapter, made first."""
    import tiny_adapter

    return str(tiny_adapter.make(ADAPTER, tiny_model.make(MODEL)))


QUESTION = "What is the capital of France?"
TINY_QUESTION = "What is a slot mapping?"
"""A question that the models of these examples that were trained here can answer."""


def chat_model() -> tuple[Path, str]:
    """Folder of a chat model, and a question that it can answer.

    It is SmolLM2, or the demo model where SmolLM2 can't be had; a line tells why.
    """
    try:
        return smollm2.make(SMOLLM2), QUESTION
    except smollm2.NoModelError as error:
        tiny_model.log(f"{error}\nThe demo model, which was trained here, takes its place.")
        return tiny_model.make(MODEL), TINY_QUESTION


ON_A_CARD = [
    *("--dtype", "bfloat16"),
    *("--max-model-len", "1024"),
    *("--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "256"),
    *("--kv-cache-memory-bytes", "256M"),
    *("--compilation-config", '{"cudagraph_capture_sizes": [1, 4, 8]}'),
    *("--additional-config", '{"npu_prep": {"check": "full"}}'),
]
"""Flags with which a patient CPU serves SmolLM2 on an emulated card."""

EMULATED = ["emulate", "--hazards", "error", "--devices"]
"""Arguments of ``vllm-npu-prep``; then come the number of emulated cards, ``--`` and a command."""

STACK = [
    *("--dtype", "bfloat16"),
    *("--quantization", "ascend"),
    *("--tensor-parallel-size", "2"),
    "--enable-expert-parallel",
    *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'),
    *("--max-model-len", "512"),
    *("--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "128"),
    *("--block-size", "16"),
    *("--kv-cache-memory-bytes", "64M"),
    # The mode is the default; four sizes are captured sooner than fifty.
    *(
        "--compilation-config",
        '{"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [3, 6, 12, 24]}',
    ),
    *("--additional-config", '{"npu_prep": {"check": "full"}}'),
]
"""Flags with which Ascend users serve DeepSeek V3, and sizes for a small model and a patient CPU.
Asynchronous scheduling and prefix caching are on by themselves."""


def deepseek() -> Path:
    """Folder of a model in DeepSeek V3's shape, W8A8, with an MTP layer; made first."""
    import tiny_deepseek

    return tiny_deepseek.make_int8(DEEPSEEK_INT8, tiny_deepseek.make(DEEPSEEK))


def image_url() -> str:
    """A picture of a sunset, as a data URL."""
    from PIL import Image

    red = Image.linear_gradient("L").resize((64, 48))  # rises downwards
    blue = red.point(lambda value: 255 - value)
    file = io.BytesIO()
    Image.merge("RGB", (red, blue.point(lambda value: value // 2), blue)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def connect(url: str, command: str) -> tuple[Any, str]:
    """A client of a server, and the name of the model that it serves.

    Parameters
    ----------
    url
        Where the server's API is.
    command
        What starts it, for the message if it isn't there.

    Raises
    ------
    SystemExit
        If there is no server.
    """
    import openai

    client = openai.OpenAI(base_url=url, api_key="none")
    try:
        return client, client.models.list().data[0].id
    except openai.APIConnectionError:
        sys.exit(f"no server at {url}: start one with `{command}`")
