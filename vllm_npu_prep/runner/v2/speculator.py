"""Drafters of the V2 runner: EAGLE and EAGLE-3 heads, a model's MTP layer, and draft models.

Upstream's V2 runner keeps the inputs of draft passes in device buffers, which four Triton kernels
advance. Here torch operators make the inputs of a pass from the step's arrays, and attention gets
lengths that are exact on the host. The first pass needs no counts of accepted tokens, because the
causal mask hides rejected tokens from accepted ones; later passes wait for the counts, whose copy
to the host has started by then.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    TargetDependentARSpeculator,
)

from vllm_npu_prep.device.readback import ReadBack
from vllm_npu_prep.ops.triton.drafting import eagle_step_slot_mapping_metadata
from vllm_npu_prep.prep.draft_lengths import next_draft_seq_lens, num_rejected_tokens
from vllm_npu_prep.runner.preparer import Builders
from vllm_npu_prep.runner.step import StepInFlight
from vllm_npu_prep.runner.v2.block_tables import NPUBlockTables
from vllm_npu_prep.runner.v2.draft_passes import DraftPasses, Images, PassSize
from vllm_npu_prep.runner.v2.drawing import RowsToDraw, argmax, draw_drafts
from vllm_npu_prep.runner.v2.verification import AcceptedCounts


class NPUSpeculator(TargetDependentARSpeculator):
    """A drafter that is a model, with one pass per draft; here it reads the target's hidden states.

    Attributes
    ----------
    builders
        Metadata builders of the drafter's layers; set with the KV cache.
    rotation_dims
        Dimensions of the positions that it rotates by, if both it and the target have M-RoPE; else
        0: it rotates by positions in the sequence.
    draft_logits
        The logits from which drafts were drawn, by request row; None if drafts are the drafter's
        most likely tokens.
    """

    builders: Builders = ()
    reads_target = True
    block_tables: NPUBlockTables  # type: ignore[assignment]

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        # Upstream's passes read them in place; ours don't
        self.hidden_states = torch.empty(0)
        self.attn_groups = []
        target, drafter = vllm_config.model_config, self.draft_model_config
        rotates = target.uses_mrope and drafter.uses_mrope
        self.rotation_dims = drafter.mrope_num_dims if rotates else 0
        self.passes = DraftPasses(
            vllm_config,
            device,
            self.hidden_size,
            reads_target=self.reads_target,
            num_dims=self.rotation_dims,
        )
        self._ones = np.arange(self.max_num_reqs + 1, dtype=np.int32)
        self._ones_device = torch.from_numpy(self._ones).to(device)

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Load the drafter as upstream does, or share embeddings if the target has no ``lm_head``.

        That is so for targets with tied embeddings.
        """
        model = super().load_draft_model(  # type: ignore[safe-super]  # upstream's next class has it
            target_model, target_attn_layer_names
        )
        language_model: Any = target_model
        if hasattr(target_model, "get_language_model"):
            language_model = language_model.get_language_model()
        own = getattr(model, "has_own_lm_head", True)
        if not own and not hasattr(language_model, "lm_head"):
            model.lm_head = language_model.get_submodule("model.embed_tokens")
        return model

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: draft passes use the builders of steps (`follow`)."""

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        eager = bool(self.speculative_config.enforce_eager)
        self.passes.make_inputs(cudagraph_mode, enforce_eager=eager)

    @torch.inference_mode()
    def capture_pass(self, num_tokens: int) -> None:
        self.passes.capture(num_tokens)

    def use_graphs(self, sizes: Iterable[int]) -> None:
        self.passes.use_graphs(sizes)

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        self.inputs_embeds = None  # upstream's buffer
        self.passes.model, self.passes.layers = self.model, self.draft_attn_layer_names
        self.passes.reads_embeds = self.supports_mm_inputs and self.reads_target

    def follow(self, builders: Builders, block_tables: NPUBlockTables) -> None:
        """Use the builders and tables of steps; layers with the same window share a builder."""
        self.block_tables = block_tables
        own = self.draft_attn_layer_names
        self.builders = [
            (group, builder, drafting)
            for group, builder, names in builders
            if (drafting := [name for name in names if name in own])
        ]

    @torch.inference_mode()
    def draft(
        self,
        in_flight: StepInFlight,
        accepted: AcceptedCounts,
        num_valid_tokens: ReadBack,
        hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor] | None,
        metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor],
        requests: RowsToDraw | None = None,
        images: Images | None = None,
    ) -> torch.Tensor:
        """Draft tokens for each request of a step, int32 ``[num_reqs, num_speculative_tokens]``.

        Parameters
        ----------
        num_valid_tokens
            The counts of accepted tokens, whose copy to the host has started.
        hidden_states, aux_hidden_states
            Those of the target, ``[num_input_tokens, hidden_size]`` each.
        metadata, slot_mappings
            Those of the step, by layer.
        requests
            The requests of the step, by whose temperatures and seeds drafts are drawn; None if all
            are greedy, or if drafts are the most likely tokens.
        images
            The encoder's outputs for the tokens after those of the step; None if the drafter reads
            none.
        """
        step, arrays = in_flight.step, in_flight.staged.device
        num_reqs, num_tokens = step.num_reqs, step.num_input_tokens
        hidden_states = self._combined(hidden_states, aux_hidden_states)[:num_tokens]
        last, output, following, positions = self._first_pass(
            in_flight, accepted, hidden_states, metadata, slot_mappings, images
        )
        of_last = None if requests is None else positions[last]
        drafts = [self._tokens(output[last], 0, of_last, requests)]
        if self.num_speculative_steps == 1:
            return drafts[0][:, None]
        following, positions = following[last], positions[last]
        # With M-RoPE, a token after an image rotates by less than its index in the sequence
        rotations = arrays.mrope_positions[:, last] if self.rotation_dims else None
        seq_lens = arrays.seq_lens[:num_reqs] - accepted.num_rejected_tokens
        num_drafts = step.batch.num_draft_tokens[:num_reqs].tolist()
        seq_lens_np = step.seq_lens - num_rejected_tokens(num_drafts, num_valid_tokens.read())
        if self.num_extra_query_per_req:
            seq_lens += self.num_extra_query_per_req
            seq_lens_np += np.int32(self.num_extra_query_per_req)
        size = self.passes.size_of(num_reqs)
        for index in range(1, self.num_speculative_steps):
            seq_lens_np = next_draft_seq_lens(seq_lens_np, self.max_model_len)
            metadata, slots = self._next_metadata(positions, seq_lens, seq_lens_np, size)
            if rotations is not None:
                rotations += 1
            places = positions if rotations is None else rotations
            output, following = self.passes.run(
                drafts[-1], places, following, metadata, slots, size
            )
            drafts.append(self._tokens(output, index, positions, requests))
        return torch.stack(drafts, 1)

    def _first_pass(
        self,
        in_flight: StepInFlight,
        accepted: AcceptedCounts,
        hidden_states: torch.Tensor,
        metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor],
        images: Images | None,
    ) -> tuple[torch.Tensor, ...]:
        """Run the pass over the step's tokens, in which each position gets the target's next token.

        `hidden_states` are those that the drafter reads; the other arguments are those of `draft`.

        Returns
        -------
        last, output, following, positions
            `last`, int64 ``[num_reqs]``, is the row of each request's last token. The others have
            all rows: hidden states for the logits, hidden states for the next pass, and positions
            in the sequence.
        """
        arrays, num_tokens = in_flight.staged.device, in_flight.step.num_input_tokens
        last = accepted.last_token_indices.long()
        input_ids = shifted(arrays.input_ids[:num_tokens], last, accepted.next_token_ids)
        positions = arrays.positions[:num_tokens]
        rotations = arrays.mrope_positions[:, :num_tokens] if self.rotation_dims else positions
        size = self.passes.size_of(num_tokens, is_step=True)
        output, following = self.passes.run(
            input_ids, rotations, hidden_states, metadata, slot_mappings, size, images
        )
        return last, output, following, positions

    def _next_metadata(
        self,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_np: np.ndarray,
        pass_size: PassSize,
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Advance all requests by a token; return metadata and slot mappings by layer.

        Parameters
        ----------
        positions, seq_lens
            int64 and int32 ``[num_reqs]`` of the previous pass; advanced in place.
        seq_lens_np
            int32 ``[num_reqs]`` of this pass.
        """
        num_reqs = len(seq_lens_np)
        metadata: dict[str, Any] = {}
        slots_by_layer: dict[str, torch.Tensor] = {}
        for index, (group, builder, names) in enumerate(self.builders, 1):
            table = self.block_tables.device_rows(num_reqs)[group]
            size = pass_size.padded or num_reqs
            slots = torch.empty(size, dtype=torch.int64, device=positions.device)
            of_group = positions, seq_lens  # the last group advances them
            if index < len(self.builders):
                of_group = positions.clone(), seq_lens.clone()
            eagle_step_slot_mapping_metadata(
                of_group[0],
                table,
                table.stride(0),
                of_group[1],
                of_group[0],
                slots,
                int(self.block_tables.block_sizes[group]),
                self.max_model_len,
                table.shape[1],
                PADDING_SLOT_ID,
                num_reqs,
            )
            common = CommonAttentionMetadata(
                query_start_loc=self._ones_device[: num_reqs + 1],
                query_start_loc_cpu=torch.from_numpy(self._ones[: num_reqs + 1]),
                seq_lens=of_group[1],
                num_reqs=num_reqs,
                num_actual_tokens=num_reqs,
                max_query_len=1,
                max_seq_len=int(seq_lens_np.max()),
                block_table_tensor=table,
                slot_mapping=slots[:num_reqs] if size > num_reqs else slots,
                seq_lens_cpu_upper_bound=torch.from_numpy(seq_lens_np),
                positions=of_group[0],
            )
            built = builder.build(0, common)
            metadata |= dict.fromkeys(names, built)
            slots_by_layer |= dict.fromkeys(names, slots)
        return metadata, slots_by_layer

    def _dummy_tokens(self, input_batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return input_batch.input_ids, input_batch.positions

    def _combined(
        self, hidden_states: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor] | None
    ) -> torch.Tensor:
        """Return what the first pass reads of the target."""
        if not aux_hidden_states:
            return hidden_states
        model: Any = self.model
        combined: torch.Tensor = model.combine_hidden_states(torch.cat([*aux_hidden_states], -1))
        return combined

    def _tokens(
        self,
        hidden_states: torch.Tensor,
        index: int = 0,
        positions: torch.Tensor | None = None,
        requests: RowsToDraw | None = None,
    ) -> torch.Tensor:
        """Return a draft of each row, int32 ``[num_reqs]``: the most likely token, or a drawn one.

        `index` is the place of the draft among those of its request; `positions` are those of the
        pass, int64 ``[num_reqs]``. Drafts are drawn by the temperatures and seeds of `requests`, if
        given.
        """
        model: Any = self.model
        logits: torch.Tensor = model.compute_logits(hidden_states)
        if requests is None:
            return argmax(logits).to(torch.int32)
        assert self.draft_logits is not None and positions is not None
        # By request row, so that verification finds them if a request is left out of steps
        at = requests.idx_mapping * self.num_speculative_steps + index
        by_draft = self.draft_logits.flatten(0, 1)
        by_draft.index_copy_(0, at, logits.to(by_draft.dtype))
        # A pass that shifts tokens has, in each row, the token after the row's position
        before = positions if self.num_extra_query_per_req else positions + 1
        return draw_drafts(logits, requests, before).to(torch.int32)

    @torch.inference_mode()
    def propose(  # type: ignore[override]  # dummy runs only
        self,
        input_batch: InputBatch,
        *,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor] | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Make as many passes as a step does, without attention: the drafter's part in a dummy run.

        The returned drafts are a buffer of upstream's and have no meaning.
        """
        del kwargs
        num_reqs = input_batch.num_reqs
        hidden_states = self._combined(last_hidden_states, aux_hidden_states)
        input_ids, positions = self._dummy_tokens(input_batch)
        if self.rotation_dims:
            positions = positions.expand(self.rotation_dims, -1)
        size = self.passes.size_of(len(input_ids), is_step=not self.num_extra_query_per_req)
        for index in range(self.num_speculative_steps):
            if index == 1:
                size = self.passes.size_of(num_reqs)
            output, hidden_states = self.passes.run(
                input_ids, positions, hidden_states, None, None, size
            )
            hidden_states, output = hidden_states[:num_reqs], output[:num_reqs]
            input_ids, positions = self._tokens(output), positions[..., :num_reqs]
        return self.draft_tokens[:num_reqs]


def shifted(
    input_ids: torch.Tensor, last_token_indices: torch.Tensor, next_token_ids: torch.Tensor
) -> torch.Tensor:
    """Return input ids of the first draft pass: a request's tokens but the first, and its next.

    This is upstream's ``_prepare_prefill_inputs_kernel``. Positions of rejected tokens hold some
    token, which nothing that counts reads. `input_ids` and the result are int32 ``[num_tokens]``;
    `last_token_indices`, int64 ``[num_reqs]``, are the last tokens that were not rejected, and
    `next_token_ids`, int32 ``[num_reqs]``, are the tokens after them.
    """
    moved = input_ids.roll(-1)
    return moved.index_copy_(0, last_token_indices, next_token_ids)
