"""What vLLM's own tests need: their sources, packages for tests, and models for the hub's names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from transformers import AutoModelForCausalLM

from tests.helpers.archives import unpack
from tests.helpers.demo import CACHE, ROOT, make_demo
from tests.helpers.drafters import make_eagle_head
from tests.helpers.lora import make_adapter

FOLDER = Path(__file__).parent
TEXT_MODELS = (
    *("facebook/opt-125m", "facebook/opt-350m", "distilbert/distilgpt2"),
    *("gpt2", "openai-community/gpt2"),
    *("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct", "google/gemma-3-1b-it"),
    *("meta-llama/Llama-3.1-8B-Instruct", "hmellor/tiny-random-LlamaForCausalLM"),
    *("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen2-0.5B"),
    *("Qwen/Qwen1.5-7B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "JackFram/llama-160m"),
    *("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
    *("meta-llama/Llama-3.2-3B-Instruct", "allenai/OLMo-2-0425-1B-Instruct"),
)
"""Models of the hub for which the first `LAYERS` of SmolLM2 stand in: any text would do."""

LAYERS = 4

SPEAKING_MODELS = (
    *("HuggingFaceTB/SmolLM2-135M-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
    *("Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "HuggingFaceH4/zephyr-7b-beta"),
    "mistralai/Ministral-8B-Instruct-2410",
)
"""Models for which all of SmolLM2 stands in: it ends what it says."""

VISION_MODELS = (
    "llava-hf/llava-1.5-7b-hf",
    "Qwen/Qwen2-VL-2B-Instruct",
    "Qwen/Qwen2.5-VL-3B-Instruct",
)
"""Models for which the tiny Qwen2.5-VL of the examples stands in."""

EAGLE3_HEADS = ("nm-testing/Llama3_2_1B_speculator.eagle3", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
"""Heads for which an untrained one of SmolLM2 stands in."""

ADAPTERS = (
    *("charent/self_cognition_Alice", "charent/self_cognition_Bob", "typeof/zephyr-7b-beta-lora"),
    *("jeeejeee/llama32-3b-text2sql-spider", "peft-internal-testing/opt-125m-dummy-lora"),
    *("Jackmin108/Qwen3-0.6B-Meow-LoRA", "Jackmin108/Qwen3-0.6B-Woof-LoRA"),
)
"""Adapters for which a random one of SmolLM2's first layers stands in."""

REVISION = "0" * 40

FOR_CUDA = {
    r'"cuda(:0)?"': '"cpu"',
    r"torch\.cuda\.is_available\(\)|HAS_TRITON\b(?=,)": "True",
    r"current_platform\.is_(cuda|cuda_alike|cpu)\(\)": "True",
    r'pytest\.importorskip\("triton"\)': "pytest",
    r"torch\.(cuda|accelerator)\.(synchronize\(\)|set_device_index\(device\))": "torch",
    r"torch\.accelerator\.device_count\(\)": "1",
}
"""What a file says that asks for CUDA or another platform, and what lets it run on the CPU."""


def sources(version: str) -> Path:
    """Unpack the tests of a release once, and return the folder that has them as ``tests``."""
    folder = CACHE / "upstream" / f"vllm-{version}"
    if folder.exists():
        return folder
    print(f"fetching the sources of vLLM {version}", flush=True)
    download = folder.with_suffix(".download")
    download.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", download]
    pip += ["--no-build-isolation", "--no-binary", "vllm", f"vllm=={version}"]
    environment = {"VLLM_VERSION_OVERRIDE": version, "VLLM_TARGET_DEVICE": "empty"}
    subprocess.run(pip, env=os.environ | environment, check=True)
    wanted = f"vllm-{version}/tests/", f"vllm-{version}/examples/", f"vllm-{version}/pyproject"
    unpack(download / f"vllm-{version}.tar.gz", download, wanted)
    (download / f"vllm-{version}").rename(folder)
    shutil.rmtree(download)
    return folder


def packages() -> Path:
    """Install what only vLLM's tests import, apart from this environment; return the folder."""
    pins = FOLDER / "requirements.txt"
    folder, stamp = CACHE / "upstream" / "packages", CACHE / "upstream" / "packages.txt"
    if not stamp.exists() or stamp.read_text() != pins.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", folder, "--requirement", pins], check=True)
        stamp.write_text(pins.read_text())
    return folder


def hub() -> Path:
    """Make a cache of the hub in which local models have the names that tests ask for."""
    folder = CACHE / "upstream" / "hub"
    speaking = make_demo("smollm2.py", "smollm2")
    models = dict.fromkeys(SPEAKING_MODELS, speaking)
    short = folder / "short"
    if not short.exists():
        shutil.copytree(speaking, short, ignore=shutil.ignore_patterns("*.sha256"))
        whole = AutoModelForCausalLM.from_pretrained(short, num_hidden_layers=LAYERS)
        whole.save_pretrained(short)
    models |= dict.fromkeys(TEXT_MODELS, short)
    seeing = make_demo("tiny_vision_model.py", "tiny-vision") / "qwen2_5_vl"
    models |= dict.fromkeys(VISION_MODELS, seeing)
    head = folder / "eagle3"
    if not head.exists():
        make_eagle_head(head, short, "eagle3")
    models |= dict.fromkeys(EAGLE3_HEADS, head)
    adapter = folder / "adapter"
    if not adapter.exists():
        make_adapter(adapter, short, seed=0, rank=8, alpha=32, spread=0.01)
    models |= dict.fromkeys(ADAPTERS, adapter)
    for name, model in models.items():
        kept = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = kept / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (kept / "refs").mkdir(exist_ok=True)
        (kept / "refs" / "main").write_text(REVISION)
        for file in model.iterdir():
            if not (snapshot / file.name).exists():
                (snapshot / file.name).symlink_to(file.resolve())
    return folder


def images() -> Path:
    """Make a cache of vLLM's own images, which are plain gray ones here."""
    folder = CACHE / "upstream" / "assets"
    for name in "stop_sign", "cherry_blossom":
        file = folder / "vllm_public_assets" / f"{name}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (112, 84), "gray").save(file)
    return folder


def let_run(file: Path) -> None:
    """Have a file of tests run on the CPU: it has more than kernels of CUDA, or Triton's alone."""
    text = file.read_text()
    for pattern, instead in FOR_CUDA.items():
        text = re.sub(pattern, instead, text)
    file.write_text(text)


def environment(version: str) -> dict[str, str]:
    """Return the variables with which a process runs vLLM's tests."""
    # vLLM's tests are the package `tests`, so this project comes behind them
    paths = sources(version), packages(), FOLDER / "inside", ROOT, ROOT / "emulator"
    return os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HOME": str(hub()),
        "HF_HUB_OFFLINE": "1",
        "VLLM_ASSETS_CACHE": str(images()),
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "NPU_PREP_DEVICE": "cpu",
    }
