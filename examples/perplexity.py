"""How well a model predicts a book, float and in int8: what rounding costs.

    python examples/perplexity.py
    python examples/perplexity.py --model FLOAT INT8
    vllm-npu-prep emulate --quiet -- python examples/perplexity.py --dtype bfloat16

Without `--model` it is SmolLM2 and four int8 copies by `quantize.py`. Perplexity is the exponential
of the mean negative log-probability of a text's tokens, each behind those before it in a run of
1,024. The engine tells these (`prompt_logprobs`), so they are what a server computes.

The text is Isaac Newton's Opticks, fourth edition of 1730, in the public domain (digitised by
Distributed Proofreaders). The package apache-tvm-ffi, which vLLM needs for structured output, has
it among its files. The beginning is measured, and the second half calibrates.
"""

import argparse
import hashlib
import math
import os
import sys
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import demo
import quantize
import smollm2
import tiny_model

TOKENS_OF_RUN = 1024
COPIES = {
    "compressed-tensors, dynamic": ("compressed-tensors", False),
    "compressed-tensors, static": ("compressed-tensors", True),
    "ModelSlim, dynamic": ("modelslim", False),
    "ModelSlim, static": ("modelslim", True),
}


def book() -> str:
    """The text of the Opticks."""
    path = quantize.book()
    if path is None:
        sys.exit(f"tvm_ffi has no {quantize.BOOK}; give a text of yours by --text FILE")
    return path.read_text()


def copies(model: Path) -> dict[str, Path]:
    """Folders of SmolLM2 and its int8 copies, made first."""
    text = quantize.calibration_text(model)
    recipe = hashlib.sha256(smollm2.recipe_hash().encode() + text.encode())
    for script in (quantize.__file__, __file__):
        recipe.update(Path(script).read_bytes())
    found = {"float": model}
    for name, (form, static) in COPIES.items():
        found[name] = tiny_model.make_once(
            f"SmolLM2 in int8 ({name})",
            demo.CACHE / f"smollm2-w8a8-{form}-{'static' if static else 'dynamic'}",
            recipe.hexdigest(),
            partial(_fill, model, form, {"text": text, "static": static}),
        )
    return found


def _fill(model: Path, form: str, how: dict[str, Any], folder: Path) -> None:
    quantize.quantize(model, folder, form, **how)


def scores(model: Path, text: str, tokens: int, dtype: str) -> list[float]:
    """Log-probabilities of the tokens at the beginning of a text, without each run's first one."""
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
    return found


def row(name: str, found: list[float], first: list[float]) -> str:
    """Perplexity, how far it is from that of the first model, and the standard error of that."""
    rises = [one - other for one, other in zip(first, found)]
    error = stdev(rises) / math.sqrt(len(rises))
    return f"{name:28} {math.exp(-fmean(found)):8.3f} {math.expm1(fmean(rises)):+8.2%} ±{error:.2%}"


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
            models = copies(smollm2.make(demo.SMOLLM2))
        except smollm2.NoModelError as error:
            sys.exit(str(error))
    rows, first = [], []
    for name, model in models.items():
        found = scores(model, text, args.tokens, args.dtype)
        first = first or found
        rows.append(row(name, found, first))
        print(rows[-1], flush=True)
    print(f"\nperplexity of {len(first):,} tokens in {args.dtype}, beside {next(iter(models))}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
