"""LoRA in plain torch: each row of a batch gets the update of its own adapter, or none.

Adapters are in vLLM's LoRA slots. vLLM's layers keep the weights of all slots in two tensors: A
``[num_slots, 1, rank, input_size]`` and B ``[num_slots, 1, output_size, rank]``. We multiply rows
with A of all slots at once, set the products of other slots than the row's own to zero, and
multiply the rest with B of all slots. The reasons:

- Shapes depend on the number of rows alone, so graphs can contain it, and nothing is read back.
- Gathering A and B for each row, as upstream's torch version does, copies ``rank * (input_size +
  output_size)`` values for each row: 8192 tokens of a prompt copy gigabytes for each layer.
- Grouping rows by adapter would give different shapes in every step.
- The price is products with slots that a row doesn't use: ``num_slots * rank`` more columns than
  the layer's own ``output_size``, a few per cent.

Rows without an adapter have index -1 and belong to no slot. Upstream's torch version indexes with
-1 and so gives them the last adapter (``lora/ops/torch_ops/lora_ops.py``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.utils.torch_utils import async_tensor_h2d, direct_register_custom_op

NO_LORA = -1
"""LoRA slot of a row without an adapter."""


def shrink(
    x: torch.Tensor,  # [num_rows, input_size]
    lora_a: torch.Tensor,  # [num_slots, (1,) rank, input_size]
    # Bool [num_rows or more, num_slots, 1], True where the slot is not the row's own
    foreign: torch.Tensor,
) -> torch.Tensor:
    """Multiply each row by A of its own slot.

    Returns
    -------
    torch.Tensor
        ``[num_rows, num_slots, rank]`` in the dtype of `lora_a`, zero in foreign slots. These are
        set to zero, not multiplied by it: another adapter's product may be infinite.
    """
    all_slots = lora_a.flatten(0, -2)  # [num_slots * rank, input_size]
    products = x.to(lora_a.dtype) @ all_slots.t()
    return products.view(len(x), len(lora_a), -1).masked_fill_(foreign[: len(x)], 0)


def spread(x: torch.Tensor, foreign: torch.Tensor) -> torch.Tensor:
    """Bring values of own slots, ``[num_rows, rank]``, into the form that `shrink` returns."""
    return x.unsqueeze(1).masked_fill(foreign[: len(x)], 0)


def expand(
    x: torch.Tensor,  # [num_rows, num_slots, rank], zero in foreign slots
    lora_b: torch.Tensor,  # [num_slots, 1, output_size, rank]
) -> torch.Tensor:
    """Multiply the result of `shrink` by B.

    Returns
    -------
    torch.Tensor
        ``[num_rows, output_size]``, zero for rows without an adapter.
    """
    # Copies B unless there is one slot; cheaper than a launch for each slot.
    all_slots = lora_b.squeeze(1).transpose(1, 2).reshape(-1, lora_b.shape[-2])
    return x.flatten(1).to(lora_b.dtype) @ all_slots


def add_lora(
    y: torch.Tensor,  # [num_rows, output_size], written
    x: torch.Tensor,  # [num_rows, input_size]
    lora_a: list[torch.Tensor],
    lora_b: list[torch.Tensor],
    foreign: torch.Tensor,  # [num_rows or more, num_slots, 1] bool
    active: torch.Tensor,  # [1] bool on the host
    scale: float,
    offset: int,
) -> None:
    """Add the updates of all slices of a layer to its output, from column `offset` on.

    If `lora_a` is empty, `x` is ``[num_rows, rank]``, already shrunk. Steps in which no row has an
    adapter skip this, and so do graphs captured in such a step.

    This is a custom operator because torch.compile traces a model once for all steps.
    """
    if not active:
        return
    for index, b in enumerate(lora_b):
        shrunk = shrink(x, lora_a[index], foreign) if lora_a else spread(x, foreign)
        if scale != 1.0:
            shrunk = shrunk * scale
        end = offset + b.shape[-2]
        y[:, offset:end].add_(expand(shrunk, b))
        offset = end


def _add_lora_fake(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: list[torch.Tensor],
    lora_b: list[torch.Tensor],
    foreign: torch.Tensor,
    active: torch.Tensor,
    scale: float,
    offset: int,
) -> None: ...


direct_register_custom_op(
    op_name="npu_prep_add_lora",
    op_func=add_lora,
    mutates_args=["y"],
    fake_impl=_add_lora_fake,
)


class PunicaWrapperNPU(PunicaWrapperBase):
    """Maps rows to adapters, and has the operations of vLLM's LoRA layers.

    The mapping on the device has a fixed address, so graphs may read it. A new mapping costs one
    copy and one launch, an unchanged one nothing: vLLM's manager updates it only if a row's adapter
    or an adapter's slot changes, which doesn't happen in plain decoding.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        num_slots, rows = kwargs["lora_config"].max_loras, max_num_batched_tokens
        # [3, rows] int32: slot of each token, slot of each sample, and where each token's adapter
        # begins in the embeddings of all slots
        self._indices = torch.full((3, rows), NO_LORA, dtype=torch.int32, device=device)
        self._token_lora_indices, self._sampler_indices, self._embeddings_indices = self._indices
        self._embeddings_indices.zero_()
        self._slots = torch.arange(num_slots, dtype=torch.int32, device=device).unsqueeze(1)
        # [2, rows, num_slots, 1] bool: where a token, or a sample, is not the slot's
        self._foreign = torch.ones((2, rows, num_slots, 1), dtype=torch.bool, device=device)
        self._foreign_tokens, self._foreign_samples = self._foreign
        self._active = torch.zeros(1, dtype=torch.bool)  # [1] on the host

    @property
    def is_active(self) -> bool:
        return bool(self._active)

    @property
    def foreign_tokens(self) -> torch.Tensor:
        """Where a slot is not the token's own, bool ``[max_num_batched_tokens, num_slots, 1]``."""
        return self._foreign_tokens

    def graph_inputs(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the mapping that a captured graph reads, by name."""
        return {"LoRA slots": self._foreign_tokens, "LoRA embeddings": self._embeddings_indices}

    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Set a step's mapping; rows after it, the padding of graphs, have no adapter.

        The mapping has the LoRA id of each token and of each sample, where 0 means none;
        `lora_index_to_id` has the LoRA id in each slot; `vocab_size` is the number of rows of one
        adapter's embeddings.
        """
        indices = np.full(self._indices.shape, NO_LORA, np.int32)  # [3, rows]
        counts = []
        for row, lora_ids in zip(indices, (mapping.index_mapping, mapping.prompt_mapping)):
            ids = np.asarray(lora_ids)
            counts.append(len(ids))
            for slot, lora_id in enumerate(lora_index_to_id):
                if lora_id is not None:
                    row[: len(ids)][ids == lora_id] = slot
            lost = ids[(ids > 0) & (row[: len(ids)] == NO_LORA)]
            assert not len(lost), f"LoRA {lost[0]} is in none of the slots {lora_index_to_id}"
        np.maximum(indices[0], 0, out=indices[2])
        indices[2] *= vocab_size
        self._active[0] = bool((indices[:2] != NO_LORA).any())
        self.indices_len[:] = [counts[0], counts[1], counts[1], counts[0]]
        async_tensor_h2d(indices, out=self._indices)
        torch.ne(self._indices[:2, :, None, None], self._slots, out=self._foreign)

    @contextmanager
    def logits_of(self, slot: int) -> Iterator[None]:
        """Let all rows of logits use one slot's adapter inside of the context; `NO_LORA`: none."""
        saved = self._foreign_samples, self.is_active
        self._foreign_samples = (self._slots != slot).expand_as(self._foreign_samples)
        self._active[0] = slot != NO_LORA
        try:
            yield
        finally:
            self._foreign_samples, self._active[0] = saved

    def add_shrink(
        self,
        y: tuple[torch.Tensor, ...] | torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Write ``x`` times A of each row's adapter to `y`, ``[num_rows, rank]`` for each slice."""
        x = x.view(-1, x.shape[-1])
        for target, lora_a in zip(y, lora_a_stacked):
            # One slot at most is not zero.
            target.copy_(shrink(x, lora_a, self._foreign_tokens).sum(1) * scale)

    def add_expand(
        self,
        y: torch.Tensor,
        x: tuple[torch.Tensor, ...] | torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Add what `add_shrink` wrote, times B, to the columns of each slice."""
        y = y.view(-1, y.shape[-1])
        if not add_inputs:
            y[:, offset_start : offset_start + sum(output_slices)] = 0
        for shrunk, lora_b, width in zip(x, lora_b_stacked, output_slices):
            self._add(y, shrunk, (), (lora_b,), self._foreign_tokens, 1.0, offset_start)
            offset_start += width

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        self.add_expand(y, (x,), (lora_b_stacked,), (y.shape[-1],), add_inputs=add_inputs)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        self._add(y, x, lora_a_stacked, lora_b_stacked, self._foreign_tokens, scale)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        self._add(y, x, (lora_a_stacked,), (lora_b_stacked,), self._foreign_samples, scale)

    def apply_lora_full_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weight_stacked: torch.Tensor,
        bias_stacked: torch.Tensor,
        module_enabled: torch.Tensor,
    ) -> None:
        """Replace rows of `y` by the output of their adapter's own linear layer, if it has one."""
        adapter_y = shrink(x, weight_stacked, self._foreign_samples).sum(1)
        y.copy_(self._select_full_linear_output(y, adapter_y, bias_stacked, module_enabled))

    def _add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a: tuple[torch.Tensor, ...],
        lora_b: tuple[torch.Tensor, ...],
        foreign: torch.Tensor,
        scale: float,
        offset: int = 0,
    ) -> None:
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        torch.ops.vllm.npu_prep_add_lora(y, x, lora_a, lora_b, foreign, self._active, scale, offset)
