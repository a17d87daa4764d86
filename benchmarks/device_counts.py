"""What preparing a step asks of the device: copies, bytes, launches and syncs, ours and upstream's.

Counts, not times: the emulated runtime can't show speed.

    vllm-npu-prep emulate --quiet -- python benchmarks/device_counts.py [--requests 32]

Both runners run the same schedule in one process, model and sampler included; a step counts from
entering `_prepare_inputs` to entering the model's forward. No number is printed unless the model
got the same inputs from both and both sampled the same tokens.
"""

import argparse
import copy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from vllm.v1.core.sched.output import SchedulerOutput

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.helpers.counting import PreparationCounts
from tests.helpers.engine import make_model, runner_of
from tests.helpers.stepping import new_request, scheduler_output, upstream_twin
from tests.helpers.v2 import engine_of

BLOCK_SIZE = 128
PROMPT = BLOCK_SIZE - 2
STEPS = {  # name: tokens computed before it
    "prefill": 0,
    "decode": PROMPT,
    "decode, last of a block": PROMPT + 1,
    "decode, a new block each": PROMPT + 2,
}


def schedule(num_reqs: int) -> Iterator[SchedulerOutput]:
    """The steps, as a scheduler would give them."""
    names = [str(index) for index in range(num_reqs)]
    for step, computed in STEPS.items():
        if computed == 0:
            prompts = [new_request(name, [5] * PROMPT, [i + 1]) for i, name in enumerate(names)]
            yield scheduler_output(dict.fromkeys(names, PROMPT), new=prompts)
            continue
        blocks = [[num_reqs + i + 1] if step.endswith("each") else [] for i in range(num_reqs)]
        cached = {name: (new, computed, computed - PROMPT + 1) for name, new in zip(names, blocks)}
        yield scheduler_output(dict.fromkeys(names, 1), cached=cached)


def run(runner: Any, num_reqs: int) -> tuple[list[dict[str, int]], list[Any]]:
    """Counts of each step, and what the model got and gave."""
    seen: list[Any] = []
    model_forward = runner._model_forward

    def recorded(input_ids: torch.Tensor, positions: torch.Tensor, **kwargs: Any) -> Any:
        seen.append((input_ids.tolist(), positions.tolist()))
        return model_forward(input_ids=input_ids, positions=positions, **kwargs)

    runner._model_forward = recorded
    counts = PreparationCounts(runner)
    for output in schedule(num_reqs):
        runner.execute_model(copy.deepcopy(output))
        result = runner.sample_tokens(None)
        if runner.use_async_scheduling:
            result = result.get_output()
        seen.append(result.sampled_token_ids)
    return counts.steps, seen


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--requests", type=int, default=32, help="decodes of a step (default: %(default)s)"
    )
    num_reqs = parser.parse_args().requests
    rows: dict[tuple[str, str], dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for async_scheduling in (False, True):
            with engine_of(
                "V1",
                model,
                dtype="float16",
                max_num_seqs=num_reqs,
                max_num_batched_tokens=num_reqs * PROMPT,
                kv_cache_memory_bytes=64 << 20,
                block_size=BLOCK_SIZE,
                async_scheduling=async_scheduling,
            ) as llm:
                ours = runner_of(llm)
                upstream = upstream_twin(ours)
                upstream.attn_groups, upstream.model = ours.attn_groups, ours.model
                upstream.sampler = ours.sampler
                counts, seen = {}, {}
                with ours.prep_device.host_streams():  # upstream's outputs make streams and events
                    for name, runner in {"ours": ours, "upstream": upstream}.items():
                        counts[name], seen[name] = run(runner, num_reqs)
                if seen["ours"] != seen["upstream"]:
                    sys.exit("the runners gave the model different inputs: no numbers")
            mode = "asynchronous" if async_scheduling else "synchronous"
            for name, steps in counts.items():
                rows |= {(f"{step}, {mode}", name): row for step, row in zip(STEPS, steps)}
    columns = sorted({key for row in rows.values() for key in row} - {"peak_memory_bytes"})
    table = Table("step", "runner", *columns)
    for (step, name), row in rows.items():
        table.add_row(step, name, *(f"{row.get(key, 0):,}" for key in columns))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
