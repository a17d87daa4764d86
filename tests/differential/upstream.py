"""Upstream's own V1 runner beside ours: the same model, its own KV cache, its own preparation."""

import copy
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.helpers.stepping import counted_exactly
from vllm_npu_prep.attention.kv_cache import allocate_planes, split_by_window, zero_blocks
from vllm_npu_prep.runner.prompt_embeds import without_unknown_ids


class UpstreamRunner(GPUModelRunner):
    """``GPUModelRunner`` as it is, on this plugin's layout of the cache and without graphs.

    Decisions about graphs are made and recorded; the step then runs eagerly.
    """

    def __init__(self, ours: Any, vllm_config: Any = None) -> None:
        with ours.prep_device.host_streams():
            super().__init__(vllm_config or ours.vllm_config, ours.device)
        self.ours = ours
        self.prep_device = ours.prep_device
        self.decision: Any = None
        self.steps_in_flight: Any = None  # of the engine, which the scheduler did not wait for
        self.model = ours.get_model()
        drafter, layers = self.drafter_of(ours)
        self.drafts_by_model = drafter is not None
        if self.drafts_by_model:  # buffers of its own, and our drafter's weights
            self.drafter.model = drafter
            self.drafter._draft_attn_layer_names = layers
            self.drafter._determine_batch_execution_and_padding = self._draft_eagerly
            self._prepare_next_token_ids = self.drafter.prepare_next_token_ids_padded
            self.drafter.prepare_next_token_ids_padded = self._go_on_behind_chunks
        if ours.lora_config is not None:
            self.lora_manager = ours.lora_manager
        with ours.prep_device.host_streams():
            self.initialize_kv_cache(ours.kv_cache_config)
        if hasattr(ours, "reorder_batch_threshold"):  # V2 has an order of its own
            self.reorder_batch_threshold = ours.reorder_batch_threshold

    def drafter_of(self, ours: Any) -> tuple[Any, set[str]]:
        """Our drafter's model and names of its layers; None and none if no model drafts."""
        drafter = getattr(ours, "drafter", None)
        if not hasattr(drafter, "_draft_attn_layer_names"):
            return None, set()
        return drafter.model, drafter._draft_attn_layer_names

    def initialize_attn_backend(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_attn_backend(*args, **kwargs)
        layers = self.compilation_config.static_forward_context
        self.attn_groups[:] = [split_by_window(groups, layers) for groups in self.attn_groups]

    def initialize_metadata_builders(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_metadata_builders(*args, **kwargs)
        if self.drafts_by_model:
            layers = self.compilation_config.static_forward_context
            self.drafter.draft_attn_groups = split_by_window(self.drafter.draft_attn_groups, layers)
            groups = [group for groups in self.attn_groups for group in groups]
            for group in groups + self.drafter.draft_attn_groups:
                group.create_metadata_builders(self.vllm_config, self.device)
                with_lengths_of_the_device(group.get_metadata_builder())

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """A draft model gets the first group's table, whichever its layers are in: upstream's bug,
        mended here as it is in ours."""
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        if common is not None and self.drafts_by_model:
            group, reqs, tokens = (
                self.drafter.kv_cache_gid,
                common.num_reqs,
                common.num_actual_tokens,
            )
            table = self.input_batch.block_table[group]
            common.block_table_tensor = table.get_device_tensor(reqs)
            common.slot_mapping = kwargs["slot_mappings"][group][:tokens]
        return metadata, common

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """As ours: drafts end at the context's end request by request, and with exact lengths."""
        if self.use_async_spec_decode and common_attn_metadata is not None:
            common_attn_metadata.max_seq_len = int(common_attn_metadata.seq_lens.max())
        return self.ours._input_fits_in_drafter(common_attn_metadata)

    def _go_on_behind_chunks(
        self, sampled_token_ids: Any, requests: Any, batch: Any, discard_request_mask: Any
    ) -> Any:
        """A drafter goes on from a prompt's last token behind each chunk of it: upstream's bug,
        mended here as it is in ours, which takes the token behind the chunk."""
        behind = self.seq_lens[: batch.num_reqs].numpy() + 1
        discarded = discard_request_mask[: batch.num_reqs].numpy()
        known = np.where(discarded, behind, batch.num_tokens_no_spec[: batch.num_reqs])
        batch = SimpleNamespace(
            num_reqs=batch.num_reqs,
            req_ids=batch.req_ids,
            vocab_size=batch.vocab_size,
            num_tokens_no_spec=known,
        )
        return self._prepare_next_token_ids(
            sampled_token_ids, requests, batch, discard_request_mask
        )

    def _draft_eagerly(self, num_tokens: int, use_cudagraphs: bool = True) -> Any:
        return CUDAGraphMode.NONE, num_tokens, None

    def initialize_kv_cache_tensors(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        caches = allocate_planes(kv_cache_config, self.prep_device)
        for layer_name, target in self.shared_kv_cache_layers.items():
            caches[layer_name] = caches[target]
        self.caches = caches
        return caches

    def _init_kv_zero_meta(self) -> None:
        pass

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        zero_blocks(self.caches.values(), block_ids)

    def _sync_device(self) -> None:
        pass

    def _update_states(self, scheduler_output: Any) -> Any:
        """Penalties count what a row held before its prompt of embeddings, and drafts rejected
        before a pause are taken off twice: upstream's bugs, mended here as they are in ours."""
        new_reqs, no_token = scheduler_output.scheduled_new_reqs, self.input_batch.vocab_size
        new_reqs[:] = [without_unknown_ids(new, no_token) for new in new_reqs]
        if self.use_async_spec_decode and not self.steps_in_flight:
            counted_exactly(self, scheduler_output)
        correct_counts = super()._update_states(scheduler_output)
        if self.use_async_spec_decode:
            self._forget_rejected_tokens()
        return correct_counts

    def _forget_rejected_tokens(self) -> None:
        """A row goes on counting drafts that were rejected: upstream's bug, mended here as in ours.

        Under asynchronous scheduling a request's list of outputs is longer than the scheduler's
        count, and its row is set back to that count, in which the last drafts are accepted. Once
        a request with penalties or bad words is in the batch, lists are kept exact and rows are
        no longer set back: each counts on from drafts that may have been rejected since, and
        `_bookkeeping_sync` finds no room for the last tokens before the context's end.
        """
        batch, sampled = self.input_batch, self.input_batch.prev_req_id_to_index or {}
        rows = [row for row, req_id in enumerate(batch.req_ids) if req_id in sampled]
        known = batch.num_computed_tokens_cpu[rows] + 1  # and the sample on the device
        batch.num_tokens_no_spec[rows] = np.minimum(batch.num_tokens_no_spec[rows], known)

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        self.decision = super()._determine_batch_execution_and_padding(*args, **kwargs)[:2]
        kwargs["force_eager"] = True
        return super()._determine_batch_execution_and_padding(*args, **kwargs)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Embeddings in every step, as upstream has it; the model was compiled for token ids."""
        get_forward_context().skip_compiled = kwargs["inputs_embeds"] is not None
        return super()._model_forward(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Generators of the CPU can't be set back, as upstream does where it drops the sample."""
        generators, held = self.input_batch.generators, {}
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
        for row in np.flatnonzero(discarded & self.prep_device.computes_on_host):
            if int(row) in generators:
                held[int(row)] = generators.pop(int(row))
        with self.prep_device.host_streams():
            result = super().sample_tokens(*args, **kwargs)
        generators.update(held)
        return result


def forget_unwritten_blocks(scheduler: Any, count: Counter[str]) -> None:
    """What a request would have computed in the step that preempts it is taken from the cache.

    Upstream's bug (vLLM issue 57580, pull request 43569), of the scheduler that both runners have:
    blocks enter the prefix cache when a request's tokens are scheduled. By priority, a request may
    be preempted later in the same step; nobody writes its tokens then, and whoever finds the blocks
    in the cache, first of all itself, reads what was there before. `count` has how often.
    """
    manager, preempt = scheduler.kv_cache_manager, scheduler._preempt_request

    def preempt_request(request: Any, *args: Any, **kwargs: Any) -> None:
        for group in manager.coordinator.single_type_managers:
            blocks = group.req_to_blocks[request.request_id]
            unwritten = blocks[request.num_computed_tokens // group.block_size :]
            count["unwritten blocks"] += any(block.block_hash for block in unwritten)
            manager.evict_blocks({block.block_id for block in unwritten})
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = preempt_request


def with_lengths_of_the_device(builder: Any) -> None:
    """Upstream's host lengths under speculation are upper bounds, which our attention can't take.

    The device's are exact; on the CPU they cost nothing to read.
    """
    build = builder.build

    def build_exactly(
        common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        common, reqs = copy.copy(common_attn_metadata), common_attn_metadata.num_reqs
        common.seq_lens_cpu_upper_bound = lengths = common.seq_lens[:reqs].clone()
        common._num_computed_tokens_cache = None
        if common.positions is None:  # of a drafter: what is behind a request's tokens is padding
            starts = common.query_start_loc_cpu[: reqs + 1]
            offsets = torch.repeat_interleave(lengths - starts[1:], starts.diff())
            common.positions = torch.arange(len(offsets)) + offsets
        return build(common_prefix_len, common, fast_build)

    builder.build = build_exactly
