"""Time to prepare a long prompt that ranks share, and the bytes that they exchange for it.

    python benchmarks/prompt_parallelism.py [--tokens 32768] [--json]

The prompt is one step (`--max-num-batched-tokens` of its length). Time is that of the host for
padding and all arrays of one rank; the numbers of ranks take turns, and each has the median of its
rounds. Bytes are arithmetic: what a rank gets from the others, by the shapes of Qwen3-8B in 16
bits. Upstream's manager gathers the hidden states of all tokens before it samples; this plugin
those of one token for each request.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.helpers.batches import step_batch
from vllm_npu_prep.prep.batch import StepBatch, prepare_step
from vllm_npu_prep.prep.layout import StepArrays, StepLayout
from vllm_npu_prep.prep.oracle import OracleRequest
from vllm_npu_prep.prep.padding import Padding
from vllm_npu_prep.prep.pcp import NO_PCP, PCPRank, largest_share
from vllm_npu_prep.prep.shape import EngineShape

RANKS = (1, 2, 4)
BLOCK_SIZE = 128
LAYERS, KV_HEADS, HEAD_SIZE, HIDDEN_SIZE, ITEMSIZE = 36, 8, 128, 4096, 2


def batch_of(num_tokens: int, ranks: int) -> StepBatch:
    """One prompt, as the first rank prepares it."""
    tokens = np.random.default_rng(0).integers(0, 1000, num_tokens).tolist()
    blocks = list(range(1, -(-num_tokens // BLOCK_SIZE) + 1))
    request = OracleRequest(0, num_tokens, num_tokens, tokens, blocks)
    batch = step_batch([request], BLOCK_SIZE, num_tokens)
    pcp = PCPRank(ranks, 0, 512) if ranks > 1 else NO_PCP
    batch.tables = replace(batch.tables, shape=EngineShape(pcp=pcp))
    return batch


def prepare(batch: StepBatch, ranks: int, kept: dict[int, tuple[StepLayout, StepArrays]]) -> int:
    """Prepare the step as a runner does, in a buffer that is kept; return the bytes of its copy."""
    share = batch.total_num_scheduled_tokens
    if ranks > 1:
        share = int(largest_share(batch.num_scheduled_tokens, ranks)[0])
    padding = Padding(share * ranks, batch.num_reqs)
    if ranks not in kept:
        layout = StepLayout(padding.num_input_tokens, batch.num_reqs, batch.tables.shape)
        kept[ranks] = layout, layout.allocate(0, len(batch.tables.block_table_flat))
    return prepare_step(batch, padding, *kept[ranks]).nbytes


def measured(num_tokens: int, rounds: int) -> list[dict[str, float]]:
    batches = {ranks: batch_of(num_tokens, ranks) for ranks in RANKS}
    times: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    kept: dict[int, tuple[StepLayout, StepArrays]] = {}
    nbytes = {ranks: prepare(batch, ranks, kept) for ranks, batch in batches.items()}
    for _ in range(rounds):
        for ranks, batch in batches.items():
            started = time.perf_counter()
            prepare(batch, ranks, kept)
            times[ranks].append(time.perf_counter() - started)
    rows = []
    for ranks in RANKS:
        others = num_tokens - num_tokens // ranks
        rows.append(
            {
                "ranks": ranks,
                "tokens of a rank": -(-num_tokens // ranks),
                "microseconds": round(1e6 * statistics.median(times[ranks]), 1),
                "bytes copied": nbytes[ranks],
                "K and V, MB": round(
                    others * 2 * KV_HEADS * HEAD_SIZE * ITEMSIZE * LAYERS / 1e6, 1
                ),
                "to sample, bytes": (ranks - 1) * HIDDEN_SIZE * ITEMSIZE,
                "to sample upstream, MB": round(others * HIDDEN_SIZE * ITEMSIZE / 1e6, 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=200, help="measured steps")
    parser.add_argument("--json", action="store_true", help="one object per line")
    given = parser.parse_args()
    rows = measured(given.tokens, given.rounds)
    if given.json:
        print(json.dumps(rows))
        return
    table = Table(*rows[0], title=f"one prompt of {given.tokens:,} tokens")
    for row in rows:
        table.add_row(*(f"{value:,}" for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
