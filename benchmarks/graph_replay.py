"""What a replayed decode step asks of the host, beside an eager one, as layers grow.

    vllm-npu-prep emulate --quiet -- python benchmarks/graph_replay.py [--layers 1 8 32 64]

Three ways to run the same decodes: eagerly; as full graphs whose attention is told each step's
lengths (what the plugin does); and as full graphs that need not be told, because attention reads a
bucket of the cache under a mask that the device makes from its own lengths. Tokens have to be
equal. Counts are those of calls into torch_npu and of bytes. Host time is that of the forward pass
until it returns, the emulated runtime's own work included: of use beside each other only.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("NPU_PREP_DEVICE", "npu")

import numpy as np
import torch
import torch_npu
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

import ascend_emulator
from tests.helpers.engine import generate, greedy, make_model, runner_of
from tests.helpers.v2 import engine_of
from vllm_npu_prep.attention import backend
from vllm_npu_prep.attention.kernels.fia import FiaKernels
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.graph.npu import AttentionTasks
from vllm_npu_prep.prep.state import AttentionState

NUM_REQS = 8
MAX_MODEL_LEN = 512
PROMPT_LENS = (5, 40, 130, 200, 17, 90, 260, 3)
MAX_TOKENS = 24
CALLS = {
    "replay": (torch_npu.npu.NPUGraph, "replay"),
    "task update": (torch_npu.npu, "graph_task_update_begin"),
    "task update end": (torch_npu.npu, "graph_task_update_end"),
    "attention": (FiaKernels, "attend"),
    "event": (torch_npu.npu.ExternalEvent, "record"),
}


class BucketKernels(FiaKernels):
    """Decodes inside a graph attend over a bucket of the cache, under a mask made on the device."""

    def attend(self, query: Any, own: Any, kv_cache: Any, metadata: Any, layer: Any,
               output: Any, workspace: Any = None) -> None:  # fmt: skip
        """As `FiaKernels.attend`, with lengths that never change."""
        if not metadata.in_full_graph or metadata.attn_state != AttentionState.DecodeOnly:
            super().attend(query, own, kv_cache, metadata, layer, output, workspace)
            return
        block_size = self._planes(kv_cache)[0].shape[1]
        bucket = metadata.block_tables.shape[1] * block_size
        key, value = self._flat
        torch_npu.npu_fused_infer_attention_score.out(
            query.unsqueeze(1),
            key,
            value,
            atten_mask=visible_columns(metadata, bucket),
            sparse_mode=0,
            input_layout="BSND",
            actual_seq_lengths_kv=[bucket] * len(query),
            block_table=metadata.block_tables,
            block_size=block_size,
            num_heads=layer.num_heads,
            num_key_value_heads=layer.num_kv_heads,
            scale=layer.scale,
            out=[output.unsqueeze(1), query.new_empty(0, dtype=torch.float32)],
        )


def visible_columns(metadata: AscendMetadata, bucket: int) -> torch.Tensor:
    """Mask ``[num_reqs, bucket]`` bool on the device, made once for all layers."""
    if not isinstance(metadata.kernel_plan, torch.Tensor):
        columns = torch.arange(bucket, device=metadata.seq_lens.device)
        # A padding request sees one cell of the null block, so that its softmax is finite.
        metadata.kernel_plan = columns[None] >= metadata.seq_lens.clamp(min=1)[:, None]
    return metadata.kernel_plan


@contextmanager
def bucketed() -> Iterator[None]:
    """Engines that are built in here use `BucketKernels`, and no task groups."""

    def capture(self: AttentionTasks, call: Any, metadata: AscendMetadata) -> None:
        call(metadata)

    with (
        mock.patch.dict(vars(backend), make_kernels=lambda *given: BucketKernels()),
        mock.patch.object(AttentionTasks, "capture", capture),
    ):
        yield


@contextmanager
def counted(counts: Counter) -> Iterator[None]:
    """Count the calls of `CALLS`."""
    saved = {name: getattr(owner, attribute) for name, (owner, attribute) in CALLS.items()}

    def counter(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return saved[name](*args, **kwargs)

        return call

    for name, (owner, attribute) in CALLS.items():
        setattr(owner, attribute, counter(name))
    try:
        yield
    finally:
        for name, (owner, attribute) in CALLS.items():
            setattr(owner, attribute, saved[name])


def run(model: Path, graphs: bool) -> tuple[list[list[int]], Counter, int, float]:
    """Tokens; calls and launches of a decode step of all requests; its median host time in ms.

    Every other step is counted, which takes time, and the others are timed.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 512, length).tolist() for length in PROMPT_LENS]
    config = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [NUM_REQS]}
    counts: Counter = Counter()
    steps: list[tuple[Counter, Any]] = []
    times: list[float] = []
    with engine_of(
        "V1",
        model,
        dtype="float16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_REQS,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=not graphs,
        compilation_config=config if graphs else {},
    ) as llm:
        runner = runner_of(llm)
        forward = runner._model_forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            step = runner.in_flight.step
            if step.num_reqs < NUM_REQS or step.max_query_len > 1:
                return forward(*args, **kwargs)
            if len(times) < len(steps):
                start = time.perf_counter()
                result = forward(*args, **kwargs)
                times.append(time.perf_counter() - start)
                return result
            counts.clear()
            with counted(counts), ascend_emulator.count() as device:
                result = forward(*args, **kwargs)
            steps.append((counts.copy(), device))
            return result

        runner._model_forward = watched
        tokens = generate(llm, prompts, greedy(MAX_TOKENS))
    calls, device = steps[-1]
    launches = device.launches + device.graph_launches
    return tokens, calls, launches, statistics.median(times) * 1000


def traffic(layers: int) -> tuple[int, int]:
    """Bytes of K and V that the last decode step reads: as long as sequences are, and buckets.

    A model of 8 K/V heads of 128 in 16 bits; the mask is counted with the buckets.
    """
    row = 2 * 8 * 128 * 2 * layers
    seq_lens = [length + MAX_TOKENS for length in PROMPT_LENS]
    bucket = NUM_REQS * MAX_MODEL_LEN
    return sum(seq_lens) * row, bucket * row + bucket * layers


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        default=[1, 8, 32, 64],
        help="numbers of layers to capture (default: %(default)s)",
    )
    table = Table("layers", "way", *CALLS, "launches", "host ms", "K and V read", "tokens")
    for layers in parser.parse_args().layers:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder) / "model", num_hidden_layers=layers)
            eager = run(model, graphs=False)
            told = run(model, graphs=True)
            with bucketed():
                untold = run(model, graphs=True)
        exact, bucket = traffic(layers)
        for way, (tokens, calls, launches, host), nbytes in (
            ("eager", eager, exact),
            ("graph, told lengths", told, exact),
            ("graph, bucket and mask", untold, bucket),
        ):
            equal = "equal" if tokens == eager[0] else "DIFFERENT"
            numbers = [str(calls[name]) for name in CALLS]
            table.add_row(
                str(layers),
                way,
                *numbers,
                str(launches),
                f"{host:.1f}",
                f"{nbytes / 2**20:.1f} MiB",
                equal,
            )
        print(f"{layers} layers done", flush=True)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
