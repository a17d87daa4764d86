"""Greedy tokens of a fixed set of prompts, as JSON: run once on the CPU fallback and once on npu:0.

python -m tests.npu.generate MODEL OUT --attention fia --dtype float16 bfloat16
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np

from tests.helpers.engine import engine, generate, greedy, runner_of

LENGTHS = [5, 150, 33, 1, 70, 128, 129]
SEED = 20240607


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(SEED)
    drawn = [rng.integers(2, 512, length).tolist() for length in LENGTHS]
    return [*drawn, drawn[1][:128] + drawn[0]]  # shares a full block of a prompt before it


def run(model: Path, attention: str, dtype: str, asynchronous: bool) -> dict:
    states: Counter = Counter()
    with engine(
        model,
        dtype=dtype,
        block_size=128,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        async_scheduling=asynchronous,
        kv_cache_memory_bytes=32 << 20,
        additional_config={"npu_prep": {"attention": attention}},
    ) as llm:
        runner = runner_of(llm)
        prepare_inputs = runner._prepare_inputs

        def counted(*args):
            result = prepare_inputs(*args)
            states[runner.last_step.attn_state.name] += 1
            return result

        runner._prepare_inputs = counted
        tokens = generate(llm, prompts()[:1], greedy(4))
        tokens += generate(llm, prompts(), greedy(12))
        device = str(runner.device)
        waits = runner.staging.waits
    return {"tokens": tokens, "states": dict(states), "device": device, "waits": waits}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--dtype", nargs="+", default=["float16"])
    args = parser.parse_args()
    results = {
        f"{dtype} {'async' if asynchronous else 'sync'}": run(
            args.model, args.attention, dtype, asynchronous
        )
        for dtype in args.dtype
        for asynchronous in (False, True)
    }
    args.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
