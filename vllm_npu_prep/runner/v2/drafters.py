"""The kinds of drafters of the V2 runner: what each reads, and which tokens its first pass has."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.spec_decode.utils import compute_new_slot_mapping, extend_all_queries_by_N
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_npu_prep.attention.metadata import common_metadata
from vllm_npu_prep.ops.triton.drafting import copy_and_expand_eagle_inputs
from vllm_npu_prep.runner.mtp_layers import warn_of_unused_layers
from vllm_npu_prep.runner.step import StepInFlight
from vllm_npu_prep.runner.v2.draft_passes import Images
from vllm_npu_prep.runner.v2.ngram import NPUNgramSpeculator
from vllm_npu_prep.runner.v2.request_states import NPURequestState
from vllm_npu_prep.runner.v2.speculator import NPUSpeculator
from vllm_npu_prep.runner.v2.verification import AcceptedCounts


class NPUEagleSpeculator(NPUSpeculator, EagleSpeculator):
    """A drafter that is an EAGLE or EAGLE-3 head."""


class NPUMTPSpeculator(NPUSpeculator, MTPSpeculator):
    """A drafter that is the model's own MTP layer; of several, the first, as in the V1 runner."""


class NPUDraftModelSpeculator(NPUSpeculator, StandaloneARSpeculator):  # type: ignore[misc]
    """A drafter that is a separate model with its own KV cache; it reads only tokens of the target.

    Its first pass has one row more for each request than the step has tokens: the accepted tokens
    of the step, the token that was sampled after them, and the rejected ones, which write nothing.
    """

    reads_target = False

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.expanded_input_ids = self.expanded_positions = torch.empty(0)  # for upstream's passes

    def _first_pass(
        self,
        in_flight: StepInFlight,
        accepted: AcceptedCounts,
        hidden_states: torch.Tensor,
        metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor],
        images: Images | None,
    ) -> tuple[torch.Tensor, ...]:
        del metadata, slot_mappings, images  # the target's
        step, staged = in_flight.step, in_flight.staged
        arrays, num_reqs, extra = staged.device, step.num_reqs, self.num_extra_query_per_req
        num_tokens = step.total_num_scheduled_tokens
        num_rows, device = num_tokens + num_reqs * extra, arrays.input_ids.device
        query_start_loc = arrays.query_start_loc[: num_reqs + 1]
        input_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
        positions = torch.empty(num_rows, dtype=torch.int64, device=device)
        is_rejected = torch.empty(num_rows, dtype=torch.bool, device=device)
        last = torch.empty(num_reqs, dtype=torch.int64, device=device)
        copy_and_expand_eagle_inputs(
            arrays.input_ids[:num_tokens],
            arrays.positions[:num_tokens],
            accepted.next_token_ids,
            input_ids,
            positions,
            is_rejected,
            torch.empty_like(is_rejected),  # no drafts are made in parallel
            last,
            last,  # not written: there are no hidden states
            query_start_loc,
            accepted.last_token_indices,
            padding_token_id=0,
            parallel_drafting_token_id=0,
            total_input_tokens=num_tokens,
            num_padding_slots_per_request=extra,
            shift_input_ids=False,
            BLOCK_SIZE_TOKENS=0,
        )
        size = self.passes.size_of(num_rows)
        metadata_of: dict[str, Any] = {}
        slots_of: dict[str, torch.Tensor] = {}
        tables = self.block_tables.device_rows(step.padding.num_reqs_padded)
        for group, builder, names in self.builders:
            common = common_metadata(step, staged, tables[group], arrays.slot_mappings[group])
            slots = compute_new_slot_mapping(
                common,
                positions,
                is_rejected,
                int(self.block_tables.block_sizes[group]),
                extra,
                self.max_model_len,
            )
            common = extend_all_queries_by_N(common, extra, self._ones_device, slots)
            assert common.seq_lens_cpu_upper_bound is not None
            common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound + extra
            common.positions = positions
            metadata_of |= dict.fromkeys(names, builder.build(0, common))
            slots_of |= dict.fromkeys(names, slots)
        output, following = self.passes.run(
            input_ids, positions, hidden_states, metadata_of, slots_of, size
        )
        return last, output, following, positions

    def _combined(
        self, hidden_states: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor] | None
    ) -> torch.Tensor:
        return hidden_states

    def _dummy_tokens(self, input_batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        more = slice(input_batch.num_reqs * self.num_extra_query_per_req)
        given = input_batch.input_ids, input_batch.positions
        input_ids, positions = (torch.cat((each, each[more])) for each in given)
        return input_ids, positions


def make_speculator(
    vllm_config: VllmConfig, device: torch.device, states: NPURequestState
) -> NPUSpeculator | NPUNgramSpeculator:
    """Make the engine's drafter from upstream's arguments.

    Methods that are not supported here have been refused at start-up.
    """
    config = vllm_config.speculative_config
    assert config is not None
    if config.method == "ngram":
        return NPUNgramSpeculator(vllm_config, device, states)
    kinds: dict[str | None, type[NPUSpeculator]] = {
        "mtp": NPUMTPSpeculator,
        "draft_model": NPUDraftModelSpeculator,
    }
    warn_of_unused_layers(config)
    return kinds.get(config.method, NPUEagleSpeculator)(vllm_config, device)


def name_aux_layers(config: SpeculativeConfig | None) -> None:
    """Put the target layers that an EAGLE-3 head reads where upstream's V2 runner looks for them.

    Heads list these layers in ``eagle_config``, where V1's runner reads them. V2's runner looks for
    another key, and would give the head the states of default layers: then few drafts are accepted,
    or the head fails because it expects another number of states.
    """
    if config is None or config.method != "eagle3":
        return
    of_head: Any = config.draft_model_config.hf_config
    key = "eagle_aux_hidden_state_layer_ids"
    named = getattr(of_head, "eagle_config", None) or {}
    if key in named and not getattr(of_head, key, None):
        setattr(of_head, key, named[key])
