"""The gated delta net of Qwen3-Next and Qwen3.5: vLLM's layer, with its core computed by torch.

vLLM's layer projects its input, passes queries, keys, values and gates to its core, and projects
the result. Upstream's core is Triton kernels or compiled ones. Here it is `forward_core`: decodes,
which come first in the batch, are computed together, and prefills one after the other.

A block that another request or another group left may hold any bits, NaNs included. An empty
recurrent state is therefore filled with zeros, and never multiplied by them.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.attention.backend import AttentionBackend

from vllm_npu_prep.attention.kernels import torch_delta
from vllm_npu_prep.attention.recurrent_backend import RecurrentBackend, RecurrentMetadata
from vllm_npu_prep.config import fused_operators

if TYPE_CHECKING:
    from vllm_npu_prep.attention.kernels.fused_delta import DeltaWeights, FusedDelta


class AscendGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    """vLLM's layer over the recurrent states in this plugin's cache."""

    fused: "FusedDelta | None" = None  # computes the core on NPUs; None on the CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enable_fused_gdn_spec_decode = False  # it is a Triton kernel for drafts in bfloat16
        self._fuses_norm = "rms_norm" in fused_operators(get_current_vllm_config())

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RecurrentBackend

    def bind_kv_cache(self, kv_cache: Any) -> None:
        """Take both parts of the recurrent states of all blocks (`attention.kv_cache`).

        Parameters
        ----------
        kv_cache
            Inputs of the convolution ``[num_blocks, kernel_size - 1, width]``, and states of the
            recurrence ``[num_blocks, H, value_dim, key_dim]``; each block's part is contiguous.
        """
        self.kv_cache = kv_cache
        conv_states, states = self._parts()
        if states.device.type == "npu":
            from vllm_npu_prep.attention.kernels.fused_delta import DeltaShape, FusedDelta

            conv_states = conv_states[:, : self.conv_kernel_size - 1]
            heads = states.shape[1] * self.num_k_heads // self.num_v_heads, states.shape[1]
            shape = DeltaShape(*heads, self.head_k_dim, self.head_v_dim)
            self.fused = FusedDelta(shape, self._fused_weights(), conv_states, states)

    def refresh(self) -> None:
        """Take weights that were loaded anew."""
        if self.fused is not None:
            self.fused.weights.refresh(self._fused_weights())

    def _fused_weights(self) -> "DeltaWeights":
        from vllm_npu_prep.attention.kernels.fused_delta import DeltaWeights

        return DeltaWeights.of(*self._convolution(), self.A_log, self.dt_bias, self.head_k_dim)

    def _output_projection(self, core_attn_out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        norm: Any = self.norm
        if self.fused is None or not self._fuses_norm or norm.weight.dtype != z.dtype:
            return super()._output_projection(core_attn_out, z)
        from vllm_npu_prep.attention.kernels.fused_delta import gated_norm

        normed = gated_norm(core_attn_out, z, norm.weight, norm.eps, norm.activation)
        output, _ = self.out_proj(normed.flatten(-2))
        return output

    def _forward_core(
        self,
        mixed_qkv: torch.Tensor,  # [num_input_tokens, width]
        b: torch.Tensor,  # [num_input_tokens, num_v_heads]
        a: torch.Tensor,  # [num_input_tokens, num_v_heads]
        core_attn_out: torch.Tensor,  # [num_input_tokens, num_v_heads, value_dim], zeros, written
    ) -> None:
        metadata = get_forward_context().attn_metadata
        of_layer: Any = metadata.get(self.prefix) if isinstance(metadata, dict) else None
        if of_layer is None:  # no cache exists yet, or a piecewise graph is being captured
            return
        self.forward_core(mixed_qkv, b, a, core_attn_out, of_layer)

    def forward_core(
        self,
        mixed: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        output: torch.Tensor,
        metadata: RecurrentMetadata,
    ) -> None:
        """Convolve, apply the gated delta rule, and write the new recurrent states.

        Parameters
        ----------
        mixed, b, a
            For each token: queries, keys and values together; what the rates are computed from; and
            what the decays are computed from.
        output
            Written, except for padding outside of full graphs.
        """
        decodes, end = metadata.num_decode_tokens, metadata.num_actual_tokens
        fused, tokens = self.fused, slice(decodes)
        if fused is not None:
            if decodes:
                output[tokens] = fused.decode(mixed[tokens], b[tokens], a[tokens], metadata)
            if metadata.num_prefills:
                tokens = slice(decodes, end)
                output[tokens] = fused.prefill(mixed[tokens], b[tokens], a[tokens], metadata)
            return
        if decodes and metadata.decode_lens is not None:
            self._decode_drafts(mixed[tokens], b[tokens], a[tokens], output[tokens], metadata)
        elif decodes:
            self._decode(mixed[tokens], b[tokens], a[tokens], output[tokens], metadata)
        if metadata.num_prefills:
            tokens = slice(decodes, end)
            self._prefill(mixed[tokens], b[tokens], a[tokens], output[tokens], metadata)

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both parts of the recurrent states of all blocks.

        With speculation, vLLM makes room in the first part for the inputs of drafts. It is not used
        here, because each draft has a state of its own, with both parts.
        """
        cache: Any = self.kv_cache
        inputs, states = cache
        return inputs[:, : self.conv_kernel_size - 1], states

    def _before(
        self, rows: slice, metadata: RecurrentMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both parts of the recurrent states of these requests before the step.

        They are zeros where a request has none. The second part is float32.
        """
        inputs, states = self._parts()
        source = metadata.initial_state_indices[rows]
        empty = ~metadata.has_initial_state[rows].view(-1, 1, 1)
        last = inputs.index_select(0, source).masked_fill_(empty, 0)
        return last, states.index_select(0, source).float().masked_fill_(empty.unsqueeze(-1), 0)

    def _keep(self, blocks: torch.Tensor, last: torch.Tensor, state: torch.Tensor) -> None:
        """Write both parts of recurrent states to their blocks, int64 ``[n]``."""
        for part, new in zip(self._parts(), (last, state), strict=True):
            part.index_copy_(0, blocks, new.to(part.dtype))

    def _convolution(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight ``[width, kernel_size]`` and the bias of the convolution."""
        convolution: Any = self.conv1d
        return convolution.weight.squeeze(1), convolution.bias

    def _rule_inputs(
        self, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor
    ) -> torch_delta.RuleInputs:
        dims = self.head_k_dim, self.head_v_dim
        return torch_delta.rule_inputs(mixed, a, b, self.A_log, self.dt_bias, *dims)

    def _decode(
        self,
        mixed: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        output: torch.Tensor,
        metadata: RecurrentMetadata,
    ) -> None:
        """Compute one token of each request; in a full graph also padding, over the null block."""
        rows = slice(0, metadata.num_decodes)
        last, state = self._before(rows, metadata)
        mixed, last = torch_delta.convolve_next(mixed, *self._convolution(), last)
        out, state = torch_delta.update_states(self._rule_inputs(mixed, b, a), state)
        self._keep(metadata.state_indices[rows].long(), last, state)
        output.copy_(out)

    def _decode_drafts(
        self,
        mixed: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        output: torch.Tensor,
        metadata: RecurrentMetadata,
    ) -> None:
        """Compute a token of each request and its drafts, one after the other; each leaves a state.

        In a full graph, all requests have the same number of drafts.
        """
        assert metadata.decode_lens is not None and metadata.token_state_indices is not None
        lens, blocks = metadata.decode_lens, metadata.token_state_indices.long()
        last, state = self._before(slice(0, metadata.num_decodes), metadata)
        weight, bias = self._convolution()
        first = torch.tensor(lens).cumsum(0) - torch.tensor(lens)
        for place in range(max(lens)):
            left = torch.tensor([row for row, length in enumerate(lens) if length > place])
            tokens = first[left] + place
            convolved, last[left] = torch_delta.convolve_next(
                mixed[tokens], weight, bias, last[left]
            )
            given = self._rule_inputs(convolved, b[tokens], a[tokens])
            out, state[left] = torch_delta.update_states(given, state[left])
            output[tokens] = out.to(output.dtype)
            self._keep(blocks[tokens], last[left], state[left])

    def _prefill(
        self,
        mixed: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        output: torch.Tensor,
        metadata: RecurrentMetadata,
    ) -> None:
        rows = slice(metadata.num_decodes, metadata.num_decodes + metadata.num_prefills)
        weight, bias = self._convolution()
        new_lasts, new_states, start = [], [], 0
        for end, last, state in zip(metadata.prefill_ends, *self._before(rows, metadata)):
            tokens = slice(start, end)
            convolved, last = torch_delta.convolve(mixed[tokens], weight, bias, last)
            given = self._rule_inputs(convolved, b[tokens], a[tokens])
            out, state = torch_delta.scan(given, state)
            output[tokens] = out.to(output.dtype)
            new_lasts.append(last)
            new_states.append(state)
            start = end
        blocks = metadata.state_indices[rows].long()
        self._keep(blocks, torch.stack(new_lasts), torch.stack(new_states))


def register_layer() -> None:
    """Register this plugin's layer in place of vLLM's, before a model is made."""
    theirs: Any = QwenGatedDeltaNetAttention
    ours: Any = AscendGatedDeltaNetAttention
    if theirs.__name__ not in op_registry_oot:
        switch = theirs.name  # the name by which users switch vLLM's layer
        PluggableLayer.register_oot(ours, name=theirs.__name__)
        ours.name = switch
