"""Where this plugin's own runners keep a step's arrays."""

from typing import Any

from vllm_npu_prep.watch.adapter import KINDS, NO_GRAPH, to_host
from vllm_npu_prep.watch.runner_step import RunnerStep
from vllm_npu_prep.watch.v1 import V1Adapter
from vllm_npu_prep.watch.v2 import V2Adapter


class OwnArrays:
    """All of a step is in one record, ``prepared``; the methods are those of vLLM's runners."""

    runner: Any
    samples: Any

    def tables(self) -> tuple[list[int], list[int]]:
        tables = self.runner.preparer.tables
        return tables.block_sizes.tolist(), tables.max_num_blocks.tolist()

    def read(self, output: Any) -> RunnerStep:
        in_flight, preparer = self.runner.prepared, self.runner.preparer
        step, arrays = in_flight.step, in_flight.staged.device
        num_reqs, num_tokens = step.num_reqs, step.total_num_scheduled_tokens
        num_blocks = step.batch.tables.num_blocks[:, step.request_rows]
        tensors = {
            "input_ids": arrays.input_ids[:num_tokens],
            "positions": arrays.positions[:num_tokens],
            "query_start_loc": arrays.query_start_loc[: num_reqs + 1],
            "seq_lens": arrays.seq_lens[:num_reqs],
            "num_computed_tokens": arrays.num_computed_tokens[:num_reqs],
            "logits_indices": arrays.logits_indices[: step.num_logits],
            "slot_mapping": arrays.slot_mapping,
        }
        tables = preparer.block_tables.device_rows(num_reqs)
        for group, table in enumerate(tables):
            tensors[f"table {group}"] = table[:num_reqs, : max(0, int(num_blocks[group].max()))]
        read: dict[str, Any] = to_host(tensors | self.samples.tensors)
        return RunnerStep(
            req_ids=list(self.runner.input_batch.req_ids),
            num_input_tokens=step.num_input_tokens,
            kind=KINDS.get(step.padding.mode.name, NO_GRAPH),
            num_blocks=num_blocks,
            block_tables=[read.pop(f"table {group}") for group in range(len(tables))],
            sampled=self.samples.take(read),
            **read,
        )


class OwnV1Adapter(OwnArrays, V1Adapter):
    """``NPUModelRunner`` of this plugin."""

    name = "vllm_npu_prep's V1 runner"
    differs: tuple[str, ...] = ()


class OwnV2Adapter(OwnArrays, V2Adapter):
    """``NPUModelRunnerV2`` of this plugin."""

    name = "vllm_npu_prep's V2 runner"
    differs: tuple[str, ...] = ()
