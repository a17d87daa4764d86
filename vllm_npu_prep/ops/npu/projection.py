"""Q, K and V projected in one launch into three tensors, each contiguous.

vLLM's models project into one tensor and split it, which gives slices with gaps between rows. What
reads these next copies them first: the norms of Q and K, and the write of V to the cache.

The split is a line in each of vLLM's models, and there is no hook around it. So what is handed to a
model answers to ``split`` and ``chunk`` as a tensor does (`ProjectedQKV`). A plain tensor would be
simpler, but a layer of Qwen3 would then take 13 launches in place of 12.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from vllm.model_executor.layers.linear import QKVParallelLinear, UnquantizedLinearMethod

from vllm_npu_prep.ops.npu.switches import is_fused

NOT_GROUPED = -1
"""``group_type`` with which each input, weight and output is a tensor of its own."""


class ProjectedQKV:
    """Q, K and V, each ``[T, N * D]``, in place of the tensor that a model splits.

    A model that does anything else with it gets that tensor, at the cost of one more launch.
    `on_whole` is called when that happens.
    """

    def __init__(self, parts: Sequence[torch.Tensor], on_whole: Callable[[], None]) -> None:
        self.parts = tuple(parts)
        self.on_whole = on_whole
        self.joined: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """Return one tensor, the same from the first call on: a model may write to it."""
        if self.joined is None:
            self.on_whole()
            self.joined = torch.cat(self.parts, -1)
        return self.joined

    def split(self, sizes: Any, dim: int = 0) -> tuple[torch.Tensor, ...]:
        widths = [part.shape[-1] for part in self.parts]
        is_ours = isinstance(sizes, list | tuple) and list(sizes) == widths and dim in (-1, 1)
        return self.parts if is_ours and self.joined is None else self.whole().split(sizes, dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
        widths = {part.shape[-1] for part in self.parts}
        is_ours = chunks == len(self.parts) and len(widths) == 1 and dim in (-1, 1)
        return self.parts if is_ours and self.joined is None else self.whole().chunk(chunks, dim)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.whole()[index]

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        args, kwargs = pytree.tree_map_only(cls, cls.whole, (args, dict(kwargs or {})))
        return function(*args, **kwargs)


class FusedQKVParallelLinear(QKVParallelLinear):
    """vLLM's projection, with a result that a model can split without a copy."""

    part_weights: list[torch.Tensor] | None = None
    part_biases: list[torch.Tensor] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_fused = (
            is_fused("qkv")
            and type(self.quant_method) is UnquantizedLinearMethod
            and not (self.skip_bias_add and self.bias is not None)
            and self.params_dtype in (torch.float16, torch.bfloat16)
        )
        if self._is_fused:
            self.quant_method = GroupedProjection()

    def forward(self, input_: torch.Tensor) -> Any:
        """Return a `ProjectedQKV` in place of the tensor, if the input is ``[T, hidden]``."""
        if not self._is_fused or self.part_weights is None or input_.dim() != 2:
            return super().forward(input_)
        parts = torch.ops.npu.npu_grouped_matmul(
            [input_] * len(self.part_weights),
            self.part_weights,
            bias=self.part_biases,
            split_item=0,
            group_type=NOT_GROUPED,
        )
        projected = ProjectedQKV(parts, self._keep_whole)
        return (projected, None) if self.return_bias else projected

    def _keep_whole(self) -> None:
        """Project into one tensor from now on, because this model doesn't split the result."""
        self._is_fused = False


class GroupedProjection(UnquantizedLinearMethod):
    """A layer's method that keeps the weights of Q, K and V apart, as views of its weight."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the parts as the operator wants them: ``[hidden, N * D]``, no bfloat16 bias."""
        super().process_weights_after_loading(layer)
        assert isinstance(layer, FusedQKVParallelLinear)
        sizes = [size // layer.tp_size for size in layer.output_sizes]
        weight = layer.weight.data
        assert isinstance(weight, torch.Tensor)
        layer.part_weights = [part.t() for part in torch.split(weight, sizes)]
        layer.part_biases = None
        if layer.bias is not None:
            bias = layer.bias.data
            bias = bias.float() if bias.dtype == torch.bfloat16 else bias
            layer.part_biases = list(torch.split(bias, sizes))
