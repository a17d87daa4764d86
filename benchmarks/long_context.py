"""Memory and time of one long prompt in chunks, by its length.

    python benchmarks/long_context.py [--json] [--lengths 8192 131072] [--picture FILE.png]
    python benchmarks/long_context.py --sparse --lengths 8192 65536
    vllm-npu-prep emulate --quiet -- python benchmarks/long_context.py --dtype float16

One engine with a model of one layer computes prompts of all lengths, one after the other, without
the prefix cache. Memory is what the engine's process takes beside what it had after its start: on
the CPU fallback resident pages, blocks of the KV cache that are used for the first time included;
on NPUs what the allocator gave out, without the cache. The bound is the one that start-up states.
Attention is quadratic in time, so a bar of milliseconds for each chunk says more than a sum.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.helpers.latent import V32

TOKENS = 4
LENGTHS = (8192, 16384, 32768, 65536, 131072)
MIB = 1 << 20


def model_for(folder: Path, longest: int, head_size: int = 64, is_sparse: bool = False) -> Path:
    """A model of one layer with one head, or with sparse attention over 2048 positions."""
    if is_sparse:
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "first_k_dense_replace": 1}
        config = {**V32, **sizes, "index_topk": 2048, "max_position_embeddings": longest}
        return make_model(folder, "DeepseekV32", **config)
    return make_model(
        folder,
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_size,
        max_position_embeddings=longest,
    )


def settings_for(longest: int, budget: int, dtype: str) -> dict[str, Any]:
    """Of an engine with room for one prompt of the longest length."""
    return {
        "dtype": dtype,
        "max_model_len": longest,
        "max_num_batched_tokens": budget,
        "max_num_seqs": 2,
        "enable_prefix_caching": False,
        "block_size": 128,
        "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": longest // 128 + 2,
    }


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens that leave room for `TOKENS` more."""
    return np.random.default_rng(seed + length).integers(2, 512, length - TOKENS).tolist()


def measured(llm: Any, length: int) -> dict[str, Any]:
    """Time and memory of one prompt, with its tokens and the engine's bound."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    device, prompt = worker.prep_device, prompt_of(length)
    device.synchronize()
    held = held_bytes(runner_of(llm)) if device.computes_on_host else 0
    device.reset_peak_memory()
    begin = device.memory_in_use()
    start = time.perf_counter()
    (tokens,) = generate(llm, [prompt], greedy(TOKENS))
    device.synchronize()
    seconds = time.perf_counter() - start
    grown = device.memory_in_use() + device.peak_memory() - begin
    return {
        "attention": "sparse" if is_sparse(llm) else "full",
        "tokens": length,
        "seconds": round(seconds, 2),
        "ms_a_chunk": round(1000 * seconds / -(-length // budget_of(llm)), 1),
        "peak_bytes": grown,
        "bound_bytes": worker.step_bytes + held,
        "got": tokens,
    }


def is_sparse(llm: Any) -> bool:
    """Whether an indexer chooses what tokens attend to."""
    return hasattr(llm.llm_engine.vllm_config.model_config.hf_text_config, "index_topk")


def held_bytes(runner: Any) -> int:
    """Of the KV cache, whose pages a host takes on their first use."""
    return sum(cache.untyped_storage().nbytes() for cache in runner.kv_caches)


def budget_of(llm: Any) -> int:
    """Tokens of a step."""
    return int(llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens)


def plot(measured: dict[str, list[dict[str, Any]]], path: Path, title: str) -> None:
    """Draw memory, with its bound, and time against length, for each kind of attention."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, duration) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for kind, rows in measured.items():
        lengths = [row["tokens"] for row in rows]
        for name, what in (("bound_bytes", "bound stated at start-up"), ("peak_bytes", "measured")):
            sizes = [row[name] / MIB for row in rows]
            memory.plot(lengths, sizes, marker="o", label=f"{kind}, {what}")
        duration.plot(lengths, [row["seconds"] for row in rows], marker="o", label=kind)
    memory.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="MiB")
    duration.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="s")
    lengths = sorted({row["tokens"] for rows in measured.values() for row in rows})
    for axis in (memory, duration):
        axis.set_xticks(lengths, [f"{length >> 10}k" for length in lengths])
        axis.minorticks_off()
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def show(rows: list[dict[str, Any]]) -> None:
    """One table."""
    columns = [name for name in rows[0] if name != "got"]
    table = Table(*(Column(name, justify="right") for name in columns))
    for row in rows:
        cells = (row[name] for name in columns)
        table.add_row(*(each if isinstance(each, str) else f"{each:,}" for each in cells))
    Console(width=100).print(table)


def main() -> None:
    """Measure, or read what was measured, and show it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="in tokens")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--dtype", default="float32", help="of weights and KV cache")
    parser.add_argument("--sparse", action="store_true", help="a model with sparse attention")
    parser.add_argument("--picture", type=Path, help="draw a picture; needs matplotlib")
    parser.add_argument(
        "--from", dest="given", type=Path, nargs="+", help="draw what --json printed, file by file"
    )
    args = parser.parse_args()
    if args.given:
        given = [[json.loads(line) for line in f.read_text().splitlines()] for f in args.given]
        rows = [row for each in given for row in each]
    else:
        rows = []
        longest = max(args.lengths)
        with tempfile.TemporaryDirectory() as folder:
            model = model_for(Path(folder), longest, is_sparse=args.sparse)
            with engine(model, **settings_for(longest, args.budget, args.dtype)) as llm:
                generate(llm, [prompt_of(args.budget)], greedy(TOKENS))  # code and threads
                for length in sorted(args.lengths):
                    rows.append(measured(llm, length))
                    if args.json:
                        print(json.dumps(rows[-1]), flush=True)
    if args.picture:
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_kind.setdefault(row["attention"], []).append(row)
        plot(by_kind, args.picture, "One long prompt in chunks: memory and time by its length")
    if not args.json:
        show(rows)


if __name__ == "__main__":
    main()
