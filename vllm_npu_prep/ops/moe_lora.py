"""LoRA on experts: each row of an expert gets the update of its own adapter, or none.

vLLM's layers read adapters and cut them for this rank. Here their weights lie by expert, so that
the matrices of all slots are one matrix of the expert: rows that are grouped by expert are
multiplied with A of all slots, the products of other slots than the row's own are set to zero, and
the rest is multiplied with B of all slots. `ops.triton.lora` has the reasons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.lora import LoRAConfig
from vllm.distributed import (
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.layers import fused_moe as upstream
from vllm.model_executor.layers.fused_moe import MoERunner

from vllm_npu_prep.compat import kernels
from vllm_npu_prep.ops.npu.experts import Multiply
from vllm_npu_prep.ops.triton.lora import PunicaWrapperNPU


class FusedMoEWithLoRA(upstream.FusedMoEWithLoRA):
    """vLLM's layer for adapters whose gates and ups are apart.

    vLLM knows it by its name, too.
    """

    def __init__(self, base_layer: MoERunner) -> None:
        # Upstream's would put itself into a kernel of the method; ours has none. It would also let
        # new weights have longer names; here layers are unwrapped while these are loaded.
        BaseLayerWithLoRA.__init__(self)
        self.base_layer = base_layer
        self.moe_config = base_layer.moe_config
        self._shared_experts = base_layer._shared_experts
        self._ep_check()
        parallel = self.moe_config.moe_parallel_config
        self.tp_size, self.tp_rank = parallel.tp_size, parallel.tp_rank
        w2: Any = base_layer.routed_experts.w2_weight
        self.device = w2.device
        self._w13_slices = 2 if self.moe_config.is_act_and_mul else 1
        self.n_slices = self.local_num_experts * (self._w13_slices + 1)
        self.enable_moe_shared_loras = False

    def _create_lora_a_weights(self, max_loras: int, lora_config: LoRAConfig) -> None:
        super()._create_lora_a_weights(max_loras, lora_config)
        # [num_slots, experts, rank, inputs], in memory [experts, num_slots, rank, inputs]
        order = (1, 0, 2, 3)
        self.w13_lora_a_stacked = _in_memory(self.w13_lora_a_stacked, order)
        self.w2_lora_a_stacked = _in_memory(self.w2_lora_a_stacked, order)

    def _create_lora_b_weights(self, max_loras: int, lora_config: LoRAConfig) -> None:
        super()._create_lora_b_weights(max_loras, lora_config)
        # [num_slots, experts, outputs, rank], in memory [experts, outputs, num_slots, rank]
        order = (1, 2, 0, 3)
        self.w13_lora_b_stacked = _in_memory(self.w13_lora_b_stacked, order)
        self.w2_lora_b_stacked = _in_memory(self.w2_lora_b_stacked, order)

    def refuse_parts(self, name: str, apart: list[str], loras: dict[str, Any]) -> None:
        """Raise a ``ValueError`` if an adapter, as it was read, doesn't fit these experts.

        Upstream would end in an assertion, or when it has given the adapter its slot.

        Parameters
        ----------
        name, apart
            The layer's name, and those of its experts' projections, as many as this rank has.
        loras
            What was read, by name.
        """
        hidden, inner = self.hidden_size, self.intermediate_size_per_partition * self.tp_size
        of_fused = inner * (2 if self.moe_config.is_act_and_mul else 1)
        forms = (
            (apart, self._w13_slices + 1, inner),
            ([f"{name}.base_layer", name], 2, of_fused),
        )
        for names, per_expert, up in forms:
            found = [each for each in names if each in loras]
            lacking = [each for each in names if each not in loras]
            if found and lacking:
                raise ValueError(
                    f"it has {found[0]} and lacks {lacking[0]}; an adapter of experts has all "
                    "experts and projections of a layer, or none"
                )
            for number, each in enumerate(found):
                is_down = number % per_expert == 1
                wanted = (inner, hidden) if is_down else (hidden, up)
                a, b = loras[each].lora_a, loras[each].lora_b
                if a is None or b is None:
                    raise ValueError(f"it lacks A or B of {each}")
                given = a.shape[-1], b.shape[-2]
                rank = a.shape[-2] // (1 if names is apart else self.global_num_experts)
                if self.fully_sharded and rank % self.tp_size:
                    raise ValueError(
                        f"{each} has rank {rank}, which --fully-sharded-loras can't divide among "
                        f"the {self.tp_size} tensor-parallel ranks"
                    )
                if given != wanted:
                    raise ValueError(
                        f"{each} makes {wanted[1]} outputs of {wanted[0]} inputs, and the adapter "
                        f"{given[1]} of {given[0]}"
                    )

    def set_mapping(self, punica_wrapper: PunicaWrapperNPU) -> None:
        BaseLayerWithLoRA.set_mapping(self, punica_wrapper)
        method: Any = self.base_layer._quant_method
        method.adapters = AdaptersOfExperts(self, punica_wrapper)


class FusedMoE3DWithLoRA(FusedMoEWithLoRA, upstream.FusedMoE3DWithLoRA):
    """vLLM's layer for adapters whose gates and ups are one matrix."""

    def __init__(self, base_layer: MoERunner) -> None:
        super().__init__(base_layer)
        self._w13_slices = 1

    def create_lora_weights(self, *args: Any, **kwargs: Any) -> None:
        super().create_lora_weights(*args, **kwargs)
        # By these names the check of graphs finds what adapters have
        self.lora_a_stacked = [*self.w13_lora_a_stacked, *self.w2_lora_a_stacked]
        self.lora_b_stacked = [*self.w13_lora_b_stacked, *self.w2_lora_b_stacked]


@dataclass(frozen=True)
class AdaptersOfExperts:
    """The adapters of a layer's experts, as its method asks for them (`ExpertAdapters`)."""

    layer: FusedMoEWithLoRA
    punica_wrapper: PunicaWrapperNPU

    @property
    def is_active(self) -> bool:
        return self.punica_wrapper.is_active

    @property
    def foreign(self) -> torch.Tensor:
        return self.punica_wrapper.foreign_tokens

    @property
    def _is_sharded(self) -> bool:
        """Whether each rank has some rows of A of the first product, and of B of the second."""
        return self.layer.fully_sharded and self.layer.tp_size > 1

    def add_up(
        self,
        hidden: torch.Tensor,  # [n, columns], written
        x: torch.Tensor,  # [n, hidden_size]
        multiply: Multiply,
        foreign: torch.Tensor,  # [n, num_slots, 1] bool
    ) -> None:
        updates = []
        for a, b in zip(self.layer.w13_lora_a_stacked, self.layer.w13_lora_b_stacked):
            shrunk = _shrink(x, a, multiply)
            if self._is_sharded:
                shrunk = tensor_model_parallel_all_gather(shrunk)
            updates.append(_expand(shrunk, b, multiply, foreign))
        # To add to some columns only, devices would copy these twice.
        hidden.add_(torch.cat(updates, 1) if len(updates) > 1 else updates[0])

    def add_down(
        self,
        output: torch.Tensor,  # [n, hidden_size], written
        activated: torch.Tensor,  # [n, inner]
        multiply: Multiply,
        foreign: torch.Tensor,  # [n, num_slots, 1] bool
    ) -> None:
        (a,), (b,) = self.layer.w2_lora_a_stacked, self.layer.w2_lora_b_stacked
        shrunk, start = _shrink(activated, a, multiply), 0
        if self._is_sharded:  # B needs the sum of the ranks' products
            shrunk = tensor_model_parallel_all_reduce(shrunk)
            start = self.layer.tp_rank * b.shape[-2]
        output[:, start : start + b.shape[-2]].add_(_expand(shrunk, b, multiply, foreign))


def _in_memory(weights: Sequence[torch.Tensor], order: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return zeros of these shapes whose dimensions follow in memory in this order."""
    back = [order.index(dim) for dim in range(len(order))]
    return tuple(
        each.new_zeros([each.shape[dim] for dim in order]).permute(back) for each in weights
    )


def _shrink(x: torch.Tensor, a: torch.Tensor, multiply: Multiply) -> torch.Tensor:
    """Multiply rows by A of all slots: ``[n, num_slots, rank]``."""
    by_expert = a.transpose(0, 1).flatten(1, 2)  # [experts, num_slots * rank, inputs]
    return multiply(x.to(a.dtype), by_expert).unflatten(1, (len(a), -1))


def _expand(
    shrunk: torch.Tensor, b: torch.Tensor, multiply: Multiply, foreign: torch.Tensor
) -> torch.Tensor:
    """Multiply own slots' products by B: ``[n, outputs]``, zero for rows without an adapter."""
    own = shrunk.masked_fill_(foreign, 0).flatten(1)
    by_expert = b.permute(1, 2, 0, 3).flatten(2)  # [experts, outputs, num_slots * rank]
    return multiply(own, by_expert)


def register_layers() -> None:
    kernels.use_lora_layers(
        {
            upstream.FusedMoEWithLoRA: FusedMoEWithLoRA,
            upstream.FusedMoE3DWithLoRA: FusedMoE3DWithLoRA,
        }
    )
