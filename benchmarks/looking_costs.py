"""What looking at steps costs of a whole decode step, model and sampler included.

    python benchmarks/looking_costs.py [--json] [--requests 256] [--steps 100]

One engine decodes on the CPU, and what counts, checks and keeps its steps is timed by itself: steps
with and without differ by less than one step from the next. The model has two layers; a larger one
makes the shares smaller. The cheap check is a part of the fused pass: ``check_us`` is only what is
left of it afterwards.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("NPU_PREP_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it would be measured, too
sys.path.insert(0, str(Path(__file__).parents[1]))

from host_step import time_looks
from rich.console import Console
from rich.table import Table

from tests.helpers.engine import greedy, make_model, runner_of
from tests.helpers.v2 import engine_of
from tests.helpers.watch import on_prepared

PROMPT_LEN = 32
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def measure(llm: Any, requests: int, steps: int) -> dict[str, Any]:
    """Medians of decode steps: the whole one, and what each part takes of it."""
    core, runner = llm.llm_engine, runner_of(llm)
    for request in range(requests):
        prompt = [2 + (request + i) % 400 for i in range(PROMPT_LEN)]
        core.add_request(str(request), {"prompt_token_ids": prompt}, greedy(steps + 64))
    longest = [0]  # query of the last step
    on_prepared(llm, lambda step: longest.append(step.max_query_len))
    while runner.input_batch.num_reqs < requests or longest[-1] > 1:
        core.step()
    del runner._prepare_inputs  # what watches it
    parts, seconds = time_looks(runner), []
    for _ in range(steps):
        start = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - start)
    whole = 1e6 * statistics.median(seconds)
    row: dict[str, Any] = {"requests": requests, "step_us": round(whole)}
    for name, times in parts.items():
        part = statistics.median(times)
        row |= {f"{name}_us": round(part, 1), f"{name}_%": round(100 * part / whole, 3)}
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object")
    parser.add_argument("--requests", type=int, default=256, help="decodes of a step")
    parser.add_argument("--steps", type=int, default=100, help="measured steps")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = {"check": "cheap", "record": {"dir": folder}}
        with engine_of(
            "V1",
            make_model(Path(folder) / "model", **MODEL),
            load_format="dummy",
            max_num_seqs=args.requests,
            max_num_batched_tokens=8192,
            max_model_len=PROMPT_LEN + args.steps + 128,
            kv_cache_memory_bytes=1 << 30,
            additional_config={"npu_prep": options},
        ) as llm:
            row = measure(llm, args.requests, args.steps)
    if args.json:
        print(json.dumps(row))
        return
    table = Table(*row)
    table.add_row(*(f"{value:,}" for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
