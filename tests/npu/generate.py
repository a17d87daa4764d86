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


SCHEDULING = {
    "sync": {"async_scheduling": False},
    "async": {"async_scheduling": True},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        }
    },
}


def run(model: Path, attention: str, dtype: str, scheduling: str) -> dict:
    states: Counter = Counter()
    with engine(
        model,
        dtype=dtype,
        block_size=128,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=32 << 20,
        additional_config={"npu_prep": {"attention": attention}},
        **SCHEDULING[scheduling],
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
    return {"tokens": tokens, "states": dict(states), "device": device}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--dtype", nargs="+", default=["float16"])
    parser.add_argument("--scheduling", nargs="+", default=list(SCHEDULING))
    args = parser.parse_args()
    results = {
        f"{dtype} {scheduling}": run(args.model, args.attention, dtype, scheduling)
        for dtype in args.dtype
        for scheduling in args.scheduling
    }
    args.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
