"""Linear layers of int8 weights and int8 inputs: how inputs are rounded and rows multiplied.

Weights have one scale for each output channel. Inputs get a scale for each token, computed from the
token (dynamic), or one scale and offset for all tokens, written in the checkpoint (static).
Products are summed in int32, so sums are exact; scales multiply the sums in float32.

Both devices compute the same: torch on the CPU, two operators of torch_npu on NPUs.
"""

from dataclasses import dataclass, field, replace
from functools import cache

import torch
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

LEVELS = 127
"""Largest magnitude that a dynamic scale gives to a number."""

EXACT_COLUMNS = 1024
"""So many products of int8 have a sum that float32 holds exactly."""

MOST_COLUMNS_OF_SWIGLU = 7840
"""How wide a result may be at most so that ``npu_dequant_swiglu_quant`` scales a token's row as a
whole. It takes a wider row in parts, and reads a part's maximum without waiting for it (cann/ops-nn
8.5.0 to 9.1.0, ``dequant_swiglu_quant_tiling_base.cpp`` and ``dynamicMultiColMax`` in
``dequant_swiglu_quant_dynamic_base.hpp``): scales may be wrong, without an error. The rows
``int8-swiglu-wide`` of ``verify-device`` find out on a device; none has been asked yet."""


def swiglu_may_round(columns: int, is_static: bool) -> bool:
    """Return whether SwiGLU may round its result of so many columns; log a line if it may not."""
    if is_static or columns <= MOST_COLUMNS_OF_SWIGLU:
        return True
    logger.info_once(
        "int8_swiglu is off for results of %s columns: above %s, CANN's operator takes rows in "
        "parts, and may read a maximum too early; no device has shown that it does not.",
        f"{columns:,}",
        f"{MOST_COLUMNS_OF_SWIGLU:,}",
    )
    return False


@dataclass
class QuantizedRows:
    """Inputs that a norm or an activation has quantised already, in place of a tensor."""

    values: torch.Tensor  # int8 [T, K]
    scale: torch.Tensor | None  # float32 [T]; None if the scale is the layer's own (static)
    dtype: torch.dtype  # the dtype that the rows had before they were rounded


@dataclass(frozen=True)
class Int8Linear:
    """Weights and scales of one linear layer of this rank, ready to multiply.

    Attributes
    ----------
    weight
        int8 ``[K, N]``: a transposed view, which both devices read as it is.
    weight_scale
        float32 ``[N]``. If static, it is the input's scale times the weight's. ``[G, N]`` if each
        of G groups of inputs has its own.
    input_scale, input_offset
        If static, float32 ``[1]`` and int32 ``[1]``. None if each token gets a scale.
    sum_bias
        int32 ``[N]``, added to the sums to take the offset out again; None unless static.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor | None = None
    input_offset: torch.Tensor | None = None
    sum_bias: torch.Tensor | None = None

    @property
    def is_static(self) -> bool:
        return self.input_scale is not None

    def __call__(
        self,
        x: "torch.Tensor | QuantizedRows",  # [..., K]
        bias: torch.Tensor | None = None,  # [N]
    ) -> torch.Tensor:
        """Compute ``x @ weight + bias`` of rounded inputs, ``[..., N]`` in the dtype of `x`."""
        if isinstance(x, QuantizedRows):
            return self.multiply(x, bias)
        rows = x.reshape(-1, x.shape[-1])
        return self.multiply(self.quantize(rows), bias).view(*x.shape[:-1], -1)

    def ordered(self, order: torch.Tensor) -> "Int8Linear":
        """Return a layer whose column i is column ``order[i]``; the weight is written in place."""
        self.weight.copy_(self.weight[:, order])
        bias = None if self.sum_bias is None else self.sum_bias[order]
        return replace(self, weight_scale=self.weight_scale[..., order], sum_bias=bias)

    def quantize(self, x: torch.Tensor) -> QuantizedRows:
        """Round rows ``[T, K]`` to int8."""
        raise NotImplementedError

    def multiply(self, rows: QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply rows that are rounded already: ``[T, N]`` in their former dtype."""
        raise NotImplementedError


@cache
def torch_sums_exactly() -> bool:
    """Return whether torch's product of int8 is exact on this processor.

    Without instructions for it (VNNI), oneDNN adds pairs of products in int16, and cuts off what
    does not fit.
    """
    largest = torch.full((32, 32), LEVELS, dtype=torch.int8, device="cpu")
    is_exact = bool((torch._int_mm(largest, largest) == 32 * LEVELS**2).all())
    if not is_exact:
        logger.info_once(
            "This processor has no instructions for products of int8 (VNNI): layers with int8 "
            "weights multiply in float32, which takes longer."
        )
    return is_exact


@dataclass(frozen=True)
class TorchInt8Linear(Int8Linear):
    """The layer on the CPU, which also defines what NPUs have to compute."""

    # Found when the layer is made: a traced model can't look at what a product gives
    sums_exactly: bool = field(default_factory=torch_sums_exactly)

    def quantize(self, x: torch.Tensor) -> QuantizedRows:
        if self.input_scale is None:
            return QuantizedRows(*quantize_tokens(x), x.dtype)
        assert self.input_offset is not None
        return QuantizedRows(quantize_all(x, self.input_scale, self.input_offset), None, x.dtype)

    def multiply(self, rows: QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
        if self.weight_scale.dim() == 2:
            product = self._sum_of_groups(rows.values)
        else:
            sums = self.sums(rows.values, self.weight)
            if self.sum_bias is not None:
                sums = sums + self.sum_bias
            product = sums.float() * self.weight_scale
        if rows.scale is not None:
            product *= rows.scale[:, None]
        if bias is not None:
            product += bias
        return product.to(rows.dtype)

    def sums(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return int32 ``[T, N]``, which holds the sums of up to 131,071 products."""
        if self.sums_exactly:
            return torch._int_mm(values.contiguous(), weight)
        sums = values.new_zeros(len(values), weight.shape[1], dtype=torch.int32)
        for part, columns in zip(values.split(EXACT_COLUMNS, 1), weight.split(EXACT_COLUMNS)):
            sums += (part.float() @ columns.float()).int()
        return sums

    def _sum_of_groups(self, values: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[T, N]``: exact sums within groups, whose scales multiply in float32."""
        size = len(self.weight) // len(self.weight_scale)
        product = values.new_zeros(len(values), self.weight.shape[1], dtype=torch.float32)
        for group, scale in enumerate(self.weight_scale):
            part = slice(group * size, (group + 1) * size)
            sums = self.sums(values[:, part], self.weight[part])
            product += sums.float() * scale
        return product


class NPUInt8Linear(Int8Linear):
    """The layer on an NPU, in two launches: one rounds the input, one multiplies."""

    def quantize(self, x: torch.Tensor) -> QuantizedRows:
        """Round by ``npu_dynamic_quant``, or by the ``npu_quantize`` that divides by the scale.

        The form that multiplies by a reciprocal wants it in the input's dtype, and bfloat16 would
        put up to a quarter of a level of error into large values.
        """
        if self.input_scale is None:
            values, scale = torch.ops.npu.npu_dynamic_quant(x)
            return QuantizedRows(values, scale, x.dtype)
        values = torch.ops.npu.npu_quantize(
            x, self.input_scale, self.input_offset, torch.qint8, -1, True
        )
        return QuantizedRows(values, None, x.dtype)

    def multiply(self, rows: QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply by ``npu_quant_matmul``, which also adds the bias if its dtypes allow one."""
        added = self.sum_bias if self.is_static else bias
        product = torch.ops.npu.npu_quant_matmul(
            rows.values,
            self.weight,
            self.weight_scale,
            pertoken_scale=rows.scale,
            bias=added,
            output_dtype=rows.dtype,
        )
        return product + bias if self.is_static and bias is not None else product


@dataclass(frozen=True)
class DequantizedLinear:
    """A layer whose weights, ``[N, K]``, were int8 in the checkpoint; inputs are not rounded."""

    weight: torch.Tensor

    def __call__(
        self,
        x: torch.Tensor,  # [..., K]
        bias: torch.Tensor | None = None,  # [N]
    ) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, bias)


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row ``[..., K]`` of any float dtype to int8 with a scale of its own.

    The second result has the scales, float32 ``[...]``: a scale is 1/127 of the largest magnitude
    of its row, and 0 for a row of zeros.
    """
    rows = x.float()
    scale = rows.abs().amax(-1) / LEVELS
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (rows / steps[..., None]).round().to(torch.int8), scale


def quantize_all(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Round to int8 with one scale and offset; what lies outside of int8 is cut off.

    The scale is float32 ``[1]``, the offset an integer ``[1]``.
    """
    return ((x.float() / scale).round() + offset).clamp(-128, 127).to(torch.int8)


def int8_linear(layer: Int8Linear, dtype: torch.dtype) -> Int8Linear:
    kind = TorchInt8Linear if layer.weight.device.type == "cpu" else NPUInt8Linear
    scale = layer.weight_scale.contiguous()
    if kind is NPUInt8Linear and layer.is_static and dtype == torch.float16:
        # Without a scale for each token, float16 results want the scale's bits in int64; given
        # float32, torch_npu would convert it in every call, a launch more.
        scale = scale.view(torch.int32).to(torch.int64)
    return kind(**{**vars(replace(layer, weight_scale=scale))})
