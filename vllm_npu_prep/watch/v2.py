"""Where vLLM's V2 runner, and those made from it, keep a step's arrays."""

from collections.abc import Callable
from typing import Any

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


class V2Adapter:
    """``GPUModelRunner`` of ``vllm.v1.worker.gpu.model_runner``.

    A request keeps its row of `req_states` and of the block tables; `prepare_inputs` returns a
    batch with the step's arrays, and `prepare_attn` the tables in the order of the batch.
    """

    name = "vLLM's V2 runner"
    differs: tuple[str, ...] = (
        "input_ids and positions of padding tokens are left over from earlier steps",
        "padding requests of full graphs have no tokens and length 0",
    )

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._kind = ""
        self._attention: Any = None  # batch, block tables, slots
        self.samples = LastSamples()

    def tables(self) -> tuple[list[int], list[int]]:
        tables = self.runner.block_tables
        widths = [table.shape[1] for table in tables.input_block_tables]
        # Of the blocks that kernels see, where a page of the cache is several of them
        return list(getattr(tables, "kernel_block_sizes", tables.block_sizes)), widths

    def before_forward(self, wraps: Wraps, see: Callable[[], None]) -> None:
        def note_graph(*args: Any) -> None:
            modes = [each.cg_mode.name for each in args if hasattr(each, "cg_mode")]
            self._kind = KINDS.get(modes[0] if modes else "", NO_GRAPH)

        def note_attention(prepared: Any, batch: Any, *args: Any) -> None:
            self._attention = batch, *prepared

        def look(*args: Any) -> None:
            if self._attention is None:  # a dummy run
                return
            try:
                see()
            finally:
                self._attention = None

        def note_samples(sampled: Any, hidden_states: Any, batch: Any, *args: Any) -> None:
            self.samples.note(batch.req_ids, sampled[0].sampled_token_ids, sampled[1])

        wraps.before(self.runner, "prepare_inputs", note_graph)
        wraps.after(self.runner, "prepare_attn", note_attention)
        wraps.before(self.runner.model_state, "prepare_inputs", look)
        wraps.after(self.runner, "sample", note_samples)

    def read(self, output: Any) -> RunnerStep:
        batch, block_tables, slots = self._attention
        rows, num_reqs, num_tokens = batch.idx_mapping_np, batch.num_reqs, batch.num_tokens
        num_blocks = self.runner.block_tables.num_blocks.np[:, rows]
        states = self.runner.req_states
        tensors: dict[str, torch.Tensor] = {
            "input_ids": batch.input_ids[:num_tokens],
            "positions": batch.positions[:num_tokens],
            "query_start_loc": batch.query_start_loc[: num_reqs + 1],
            "seq_lens": batch.seq_lens[:num_reqs],
            "num_computed_tokens": on_device(states.num_computed_tokens)[batch.idx_mapping],
            "logits_indices": batch.logits_indices,
            "slot_mapping": slots[:, : batch.num_tokens_after_padding],
        }
        for group, table in enumerate(block_tables):
            columns = max(0, int(num_blocks[group].max(initial=0)))
            tensors[f"table {group}"] = table[:num_reqs, :columns]
        read: dict[str, Any] = to_host(tensors | self.samples.tensors)
        tables = [read.pop(f"table {group}") for group in range(len(block_tables))]
        return RunnerStep(
            req_ids=list(batch.req_ids),
            num_input_tokens=batch.num_tokens_after_padding,
            kind=self._kind,
            num_blocks=num_blocks,
            block_tables=tables,
            sampled=self.samples.take(read),
            **read,
        )


class AscendV2Adapter(V2Adapter):
    """``NPUModelRunner`` of ``vllm_ascend.worker.v2.model_runner``: the same names."""

    name = "vllm-ascend's V2 runner"
    differs: tuple[str, ...] = (
        "input_ids and positions of padding tokens are left over from earlier steps",
        "padding requests of full graphs have the padding tokens, and length 0",
    )

    def read(self, output: Any) -> RunnerStep:
        given = super().read(output)
        given.of_layers = host_lists(self.runner.model_state.attn_metadata, len(given.req_ids))
        return given
