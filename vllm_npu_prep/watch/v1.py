"""Where vLLM's V1 runner, and those made from it, keep a step's arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_npu_prep.watch.adapter import (
    KINDS,
    NO_GRAPH,
    LastSamples,
    Wraps,
    host_lists,
    on_device,
    to_host,
)
from vllm_npu_prep.watch.runner_step import RunnerStep


class V1Adapter:
    """``GPUModelRunner`` of ``vllm.v1.worker.gpu_model_runner``.

    Its rows of requests are the batch. Positions, lengths and slots are computed on the device;
    with asynchronous scheduling so are input ids, whose copy on the host is stale then.
    """

    name = "vLLM's V1 runner"
    differs: tuple[str, ...] = (
        "input_ids and positions of padding tokens are left over from earlier steps",
        "padding requests of full graphs have no tokens and length 0",
    )

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._logits_indices: torch.Tensor | None = None
        self.samples = LastSamples()

    @property
    def _tables(self) -> list[Any]:
        return self.runner.input_batch.block_table.block_tables

    def tables(self) -> tuple[list[int], list[int]]:
        widths = [on_device(table.block_table).shape[1] for table in self._tables]
        return [table.block_size for table in self._tables], widths

    def before_forward(self, wraps: Wraps, see: Callable[[], None]) -> None:
        def note_rows(prepared: Any, *args: Any) -> None:
            self._logits_indices = prepared[0]

        def note_samples(sampled: Any, *args: Any) -> None:
            self.samples.note(self.runner.input_batch.req_ids, sampled.sampled_token_ids)

        wraps.after(self.runner, "_prepare_inputs", note_rows)
        wraps.before(self.runner, "_model_forward", lambda *args: see())
        wraps.after(self.runner, "_sample", note_samples)

    def read(self, output: Any) -> RunnerStep:
        from vllm.forward_context import get_forward_context

        runner, batch = self.runner, self.runner.input_batch
        num_reqs, num_tokens = batch.num_reqs, output.total_num_scheduled_tokens
        context, logits = get_forward_context(), self._logits_indices
        assert logits is not None and context.batch_descriptor is not None
        padded = max(num_tokens, context.batch_descriptor.num_tokens)
        num_blocks = np.stack([table.num_blocks_per_row[:num_reqs] for table in self._tables])
        tensors = {
            "input_ids": on_device(runner.input_ids)[:num_tokens],
            "positions": on_device(runner.positions)[:num_tokens],
            "query_start_loc": on_device(runner.query_start_loc)[: num_reqs + 1],
            "seq_lens": on_device(runner.seq_lens)[:num_reqs],
            "num_computed_tokens": on_device(runner.num_computed_tokens)[:num_reqs],
            "logits_indices": logits,
            "slot_mapping": torch.stack([on_device(t.slot_mapping)[:padded] for t in self._tables]),
        }
        for group, table in enumerate(self._tables):
            columns = max(0, int(num_blocks[group].max(initial=0)))
            tensors[f"table {group}"] = on_device(table.block_table)[:num_reqs, :columns]
        read: dict[str, Any] = to_host(tensors | self.samples.tensors)
        tables = [read.pop(f"table {group}") for group in range(len(self._tables))]
        return RunnerStep(
            req_ids=list(batch.req_ids[:num_reqs]),
            num_input_tokens=padded,
            kind=KINDS.get(context.cudagraph_runtime_mode.name, NO_GRAPH),
            num_blocks=num_blocks,
            block_tables=tables,
            sampled=self.samples.take(read),
            **read,
        )


class AscendV1Adapter(V1Adapter):
    """``NPUModelRunner`` of ``vllm_ascend.worker.model_runner_v1``: the same names."""

    name = "vllm-ascend's V1 runner"
    differs: tuple[str, ...] = (
        "input_ids and positions of padding tokens are left over from earlier steps",
        "padding requests of full graphs have the padding tokens, and length 0",
    )

    def read(self, output: Any) -> RunnerStep:
        from vllm.forward_context import get_forward_context

        given = super().read(output)
        given.of_layers = host_lists(get_forward_context().attn_metadata, len(given.req_ids))
        return given
