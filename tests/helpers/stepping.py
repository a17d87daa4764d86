"""Driving a runner step by step with real scheduler outputs, without a forward pass."""

import copy
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def upstream_twin(runner: Any) -> GPUModelRunner:
    """Upstream's own V1 runner for the same config: its tables and buffers, no model of its own."""
    with runner.prep_device.host_streams():
        twin = GPUModelRunner(runner.vllm_config, runner.device)
    twin.kv_cache_config = runner.kv_cache_config
    twin.may_reinitialize_input_batch(runner.kv_cache_config)
    return twin


def new_request(
    req_id: str, prompt: list[int], block_ids: list[int], num_computed_tokens: int = 0
) -> NewRequestData:
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=SamplingParams(temperature=0),
        pooling_params=None,
        block_ids=(list(block_ids),),
        num_computed_tokens=num_computed_tokens,
        lora_request=None,
        prefill_token_ids=list(prompt),
    )


def scheduler_output(
    num_scheduled_tokens: dict[str, int],
    new: list[NewRequestData] = (),  # type: ignore[assignment]
    cached: dict[str, tuple[list[int], int, int]] | None = None,
    finished: set[str] = frozenset(),  # type: ignore[assignment]
) -> SchedulerOutput:
    """One step; `cached` maps a request to new blocks, computed tokens and output tokens."""
    cached = cached or {}
    return SchedulerOutput(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(cached),
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[(blocks,) if blocks else None for blocks, _, _ in cached.values()],
            num_computed_tokens=[computed for _, computed, _ in cached.values()],
            num_output_tokens=[outputs for _, _, outputs in cached.values()],
        ),
        num_scheduled_tokens=num_scheduled_tokens,
        total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(finished),
        free_encoder_mm_hashes=[],
    )


def arrays_of(runner: Any, logits_indices: Any, spec: Any, most_sampled: int) -> dict[str, Any]:
    """A step's arrays by upstream's names; the arguments are what `_prepare_inputs` returned."""
    batch, reqs = runner.input_batch, runner.input_batch.num_reqs
    total = int(runner.query_start_loc.np[reqs])
    return {
        "req_ids": list(batch.req_ids),
        "positions": runner.positions[:total].tolist(),
        "query_start_loc": runner.query_start_loc.gpu[: reqs + 1].tolist(),
        "query_start_loc_cpu": runner.query_start_loc.np[: reqs + 1].tolist(),
        "seq_lens": runner.seq_lens[:reqs].tolist(),
        "seq_lens_cpu": runner.optimistic_seq_lens_cpu[:reqs].tolist(),
        "num_computed_tokens": runner.num_computed_tokens[:reqs].tolist(),
        "discard_request_mask": runner.discard_request_mask.gpu[:reqs].tolist(),
        "discard_request_mask_cpu": runner.discard_request_mask.np[:reqs].tolist(),
        "logits_indices": logits_indices.tolist(),
        "max_num_sampled_tokens": most_sampled,
        "spec_decode_metadata": None
        if spec is None
        else {k: v.tolist() if torch.is_tensor(v) else v for k, v in vars(spec).items()},
        "block_table": [
            [row[:owned].tolist() for row, owned in zip(rows, table.num_blocks_per_row)]
            for table in batch.block_table.block_tables
            for rows in [table.get_device_tensor(reqs).cpu()]
        ],
    }


def prepare(runner: Any, output: SchedulerOutput) -> dict[str, Any]:
    """`_update_states`, `_prepare_inputs` and the padding decision, as `execute_model` does."""
    output = copy.deepcopy(output)  # runners keep and extend its lists
    with torch.inference_mode():
        runner._update_states(output)
        batch = runner.input_batch
        tokens = [output.num_scheduled_tokens[req_id] for req_id in batch.req_ids]
        counts = np.array(tokens, np.int32)
        total, reqs = output.total_num_scheduled_tokens, batch.num_reqs
        prepared = runner._prepare_inputs(output, counts)
        mode, descriptor, *_ = runner._determine_batch_execution_and_padding(
            num_tokens=total,
            num_reqs=reqs,
            num_scheduled_tokens_np=counts,
            max_num_scheduled_tokens=int(counts.max()),
        )
        by_group, _ = runner._get_slot_mappings(total, reqs, total)
        return {
            **arrays_of(runner, *prepared),
            "input_ids": runner.input_ids.gpu[:total].tolist(),
            "slot_mapping": {gid: slots[:total].tolist() for gid, slots in by_group.items()},
            "padding": (mode, descriptor),
        }


def bookkeep(
    runner: Any,
    output: SchedulerOutput,
    tokens: dict[str, int] | dict[str, list[int]],
    drafts: torch.Tensor | None = None,
) -> list[list[int]]:
    """Let the runner book sampled tokens as if its sampler had chosen `tokens`.

    With `drafts`, int32 ``[num_reqs, num_drafts]``, as if a drafter on the device had made them.

    Returns
    -------
    list
        The tokens that count, for each request of the batch; empty under async scheduling.
    """
    rows = [tokens[req_id] for req_id in runner.input_batch.req_ids]
    rows = [row if isinstance(row, list) else [row] for row in rows]
    width = max(map(len, rows))
    sampled = torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)
    total = output.total_num_scheduled_tokens
    with torch.inference_mode():
        if runner.use_async_scheduling:
            runner.input_batch.prev_sampled_token_ids = None  # as `sample_tokens` does
        if drafts is not None:
            batch, discarded = runner.input_batch, runner.discard_request_mask.gpu
            counted = runner.drafter.prepare_next_token_ids_padded(
                sampled, runner.requests, batch, discarded
            )
            runner._copy_valid_sampled_token_count(*counted)
            runner._draft_token_ids = drafts
            runner._copy_draft_token_ids_to_cpu(output)
        *_, valid, _, _, _, _ = runner._bookkeeping_sync(
            output,
            SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=None),
            None,
            torch.zeros(total, 1),
            total,
        )
    return valid


def counted_exactly(runner: Any, output: SchedulerOutput) -> None:
    """Tell upstream's V1 runner that the scheduler has waited for its last step, as in a pause.

    Then its counts are exact. Upstream's bug (vLLM pull requests 42043, 42117, 46899): it takes
    rejected drafts off once more. Told that there were none, it keeps the counts; it cuts the
    placeholders of tokens to the scheduler's number.
    """
    rows, cached = runner.input_batch.req_id_to_index, output.scheduled_cached_reqs
    for name in set(cached.req_ids) - cached.resumed_req_ids:
        if name in rows:
            state = runner.requests[name]
            state.output_token_ids.extend([-1] * state.prev_num_draft_len)
            state.prev_num_draft_len = 0


def books(runner: Any) -> dict[str, Any]:
    """What a runner has on record of its requests and of the batch's rows."""
    batch = runner.input_batch
    lengths = batch.num_tokens_no_spec[: batch.num_reqs]
    return {
        "output_token_ids": {r: list(s.output_token_ids) for r, s in runner.requests.items()},
        "block_ids": {r: [list(ids) for ids in s.block_ids] for r, s in runner.requests.items()},
        "rows": dict(batch.req_id_to_index),
        "token_ids": [row[:n].tolist() for row, n in zip(batch.token_ids_cpu, lengths)],
        "is_token_ids": [row[:n].tolist() for row, n in zip(batch.is_token_ids, lengths)],
        "num_computed_tokens": batch.num_computed_tokens_cpu[: batch.num_reqs].tolist(),
        "prev_req_id_to_index": batch.prev_req_id_to_index,
    }
