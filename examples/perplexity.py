"""How well a model predicts a book, float and in int8: what rounding costs.

    python examples/perplexity.py
    python examples/perplexity.py --model FLOAT INT8
    vllm-npu-prep emulate --quiet -- python examples/perplexity.py --dtype bfloat16

Without `--model` it is SmolLM2 and four int8 copies by `quantize.py`. Perplexity is the exponential
of the mean negative log-probability of a text's tokens, each behind those before it in a run of
1,024. The engine tells these (`prompt_logprobs`), so they are what a server computes.

The text is Isaac Newton's Opticks, fourth edition of 1730, in the public domain (digitised by
Distributed Proofreaders). The package apache-tvm-ffi, which vLLM needs for structured output, has
it among its files. The beginning is measured, and the second half calibrates static scales.
"""

import argparse
import hashlib
import math
import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import demo
import quantize
import smollm2
import tiny_model

BOOK = "3rdparty/libbacktrace/Isaac.Newton-Opticks.txt"
TOKENS_OF_RUN = 1024
COPIES = {
    "compressed-tensors, dynamic": ("compressed-tensors", False),
    "compressed-tensors, static": ("compressed-tensors", True),
    "ModelSlim, dynamic": ("modelslim", False),
    "ModelSlim, static": ("modelslim", True),
}
HOW = {"smooth": True, "keep": ("down_proj",)}
"""A few tokens have inputs of `down_proj` with one number a thousand times as large as the rest."""


def book() -> str:
    """The text of the Opticks."""
    spec = find_spec("tvm_ffi")
    path = Path(spec.origin).parent / BOOK if spec and spec.origin else Path(BOOK)
    try:
        return path.read_text()
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}; give a text of yours by --text FILE")


def copies(model: Path, text: str) -> dict[str, Path]:
    """Folders of SmolLM2 and its int8 copies, made first."""
    recipe = hashlib.sha256(smollm2.recipe_hash().encode() + text.encode())
    for script in (quantize.__file__, __file__):
        recipe.update(Path(script).read_bytes())
    found = {"float": model}
    for name, (form, static) in COPIES.items():
        found[name] = tiny_model.make_once(
            f"SmolLM2 in int8 ({name})",
            demo.CACHE / f"smollm2-w8a8-{form}-{'static' if static else 'dynamic'}",
            recipe.hexdigest(),
            partial(_fill, model, form, {"text": text, "static": static, **HOW}),
        )
    return found


def _fill(model: Path, form: str, how: dict[str, Any], folder: Path) -> None:
    quantize.quantize(model, folder, form, **how)


def perplexity(model: Path, text: str, tokens: int, dtype: str) -> tuple[float, int]:
    """Perplexity of the beginning of a text, and the number of tokens that were predicted."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # which would import vLLM once a model
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        str(model),
        dtype=dtype,
        max_model_len=TOKENS_OF_RUN + 1,
        max_num_seqs=2,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
    )
    ids = llm.get_tokenizer().encode(text)[:tokens]
    runs = [ids[start : start + TOKENS_OF_RUN] for start in range(0, len(ids), TOKENS_OF_RUN)]
    outputs = llm.generate(
        [{"prompt_token_ids": run} for run in runs if len(run) > 1],
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
    )
    found = [
        told[token].logprob
        for output in outputs
        for token, told in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
    ]
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return math.exp(-sum(found) / len(found)), len(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", nargs="+", type=Path, help="folders; others are compared with the first"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: Newton's Opticks")
    parser.add_argument("--tokens", type=int, default=10240, help="default: %(default)s")
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    args = parser.parse_args()
    text = args.text.read_text() if args.text else book()
    if args.model:
        models = {str(model): model for model in args.model}
    else:
        try:
            models = copies(smollm2.make(demo.SMOLLM2), text[len(text) // 2 :])
        except smollm2.NoModelError as error:
            sys.exit(str(error))
    rows, first = [], 0.0
    for name, model in models.items():
        value, count = perplexity(model, text, args.tokens, args.dtype)
        first = first or value
        rows.append(f"{name:28} {value:8.3f} {value / first - 1:+8.2%}")
        print(rows[-1], flush=True)
    print(f"\nperplexity of {count:,} tokens in {args.dtype}, beside {next(iter(models))}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
