"""What preparing a step asks of the device: copies, bytes, launches and syncs, ours and upstream's.

Counts, not times: the emulated runtime can't show speed.

    vllm-npu-prep emulate --quiet -- python benchmarks/device_counts.py [--requests 32]

Both runners get the same schedule in one process; a step counts from entering `_prepare_inputs` to
having metadata for the layers. No number is printed unless both prepared the same arrays.
"""

import argparse
import copy
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.helpers.engine import engine, make_model, runner_of
from tests.helpers.stepping import (
    bookkeep,
    new_request,
    prepare,
    scheduler_output,
    upstream_twin,
)
from vllm_npu_prep import emulator

PROMPT = 20


def count_step(runner, output) -> dict[str, int]:
    """Counts of one step's preparation."""
    output = copy.deepcopy(output)
    with torch.inference_mode():
        runner._update_states(output)
        batch = runner.input_batch
        counts = np.array([output.num_scheduled_tokens[r] for r in batch.req_ids], np.int32)
        total, longest = int(counts.sum()), int(counts.max())
        torch.npu.synchronize()
        with emulator.count() as counted:
            indices, _, sampled = runner._prepare_inputs(output, counts)
            runner._determine_batch_execution_and_padding(
                num_tokens=total,
                num_reqs=batch.num_reqs,
                num_scheduled_tokens_np=counts,
                max_num_scheduled_tokens=longest,
            )
            by_group, _ = runner._get_slot_mappings(total, batch.num_reqs, total)
            runner._build_attention_metadata(
                num_tokens=total,
                num_reqs=batch.num_reqs,
                max_query_len=longest,
                logits_indices=indices,
                max_num_sampled_tokens=sampled,
                num_scheduled_tokens=output.num_scheduled_tokens,
                slot_mappings=by_group,
            )
    return counted.nonzero()


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    num_reqs = parser.parse_args().requests
    names = [str(index) for index in range(num_reqs)]
    prefill = scheduler_output(
        dict.fromkeys(names, PROMPT),
        new=[new_request(name, [5] * PROMPT, [i + 1]) for i, name in enumerate(names)],
    )
    decode = [
        scheduler_output(
            dict.fromkeys(names, 1), cached={n: ([], PROMPT + i, 1 + i) for n in names}
        )
        for i in range(3)
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        engine(
            make_model(Path(folder)),
            load_format="dummy",
            dtype="float16",
            max_num_seqs=num_reqs,
            max_num_batched_tokens=num_reqs * PROMPT,
            async_scheduling=False,
        ) as llm,
    ):
        ours = runner_of(llm)
        runners = {"vllm_npu_prep": ours, "upstream": upstream_twin(ours)}
        runners["upstream"].attn_groups = ours.attn_groups
        counts: dict[str, dict[str, int]] = {}
        prepared = {}
        for name, runner in runners.items():
            counts[f"prefill, {name}"] = count_step(runner, prefill)
            bookkeep(runner, prefill, dict.fromkeys(names, 7))
            prepared[name] = prepare(runner, decode[0])
            if runner is ours:
                runner._build_attention_metadata()
            bookkeep(runner, decode[0], dict.fromkeys(names, 7))
            counts[f"decode, {name}"] = count_step(runner, decode[1])
    if prepared["upstream"] != prepared["vllm_npu_prep"]:
        sys.exit("the runners prepared different arrays: no numbers")
    table = Table("step", *(columns := sorted({key for row in counts.values() for key in row})))
    for name, row in counts.items():
        table.add_row(name, *(f"{row.get(key, 0):,}" for key in columns))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
