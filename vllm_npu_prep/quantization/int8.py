"""Linear layers of int8 weights and int8 inputs: how inputs are rounded and rows multiplied.

Weights have one scale for each output channel. Inputs get a scale for each token, computed from the
token (dynamic), or one scale and offset for all tokens, written in the checkpoint (static).
Products are summed in int32, so sums are exact; scales multiply the sums in float32.

Both devices compute the same: torch on the CPU, two operators of torch_npu on NPUs.
"""

from dataclasses import dataclass, replace

import torch
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

LEVELS = 127
"""Largest magnitude that a dynamic scale gives to a number."""


MOST_COLUMNS_OF_SWIGLU = 7840
"""Of a result, to which ``npu_dequant_swiglu_quant`` gives scales by token as a whole row. It takes
a wider row in parts, and reads a part's maximum without waiting for it (cann/ops-nn 8.5.0 to 9.1.0,
``dequant_swiglu_quant_tiling_base.cpp`` and ``dynamicMultiColMax`` in
``dequant_swiglu_quant_dynamic_base.hpp``): scales may be wrong, without an error. Rows
``int8-swiglu-wide`` of ``verify-device`` tell on a device; none has been asked yet."""


def swiglu_may_round(columns: int, is_static: bool) -> bool:
    """Whether SwiGLU may round its result of so many columns itself; a line says if not."""
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
    """Inputs that a norm or an activation has quantised already, in place of a tensor.

    Attributes
    ----------
    values
        int8 ``[T, K]``.
    scale
        float32 ``[T]``; None if the scale is the layer's own (static).
    dtype
        Of the rows before they were rounded.
    """

    values: torch.Tensor
    scale: torch.Tensor | None
    dtype: torch.dtype


@dataclass(frozen=True)
class Int8Linear:
    """Weights and scales of one linear layer of this rank, ready to multiply.

    Attributes
    ----------
    weight
        int8 ``[K, N]``: a transposed view, which both devices read as it is.
    weight_scale
        float32 ``[N]``. Static: the input's scale times that of the weight.
    input_scale, input_offset
        Static: float32 ``[1]`` and int32 ``[1]``. None: a scale for each token.
    sum_bias
        int32 ``[N]``, added to the sums: takes the offset out again. Static only.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor | None = None
    input_offset: torch.Tensor | None = None
    sum_bias: torch.Tensor | None = None

    @property
    def is_static(self) -> bool:
        """Whether one scale, known before, serves all tokens."""
        return self.input_scale is not None

    def __call__(
        self,
        x: "torch.Tensor | QuantizedRows",  # [..., K]
        bias: torch.Tensor | None = None,  # [N]
    ) -> torch.Tensor:
        """``x @ weight + bias`` of rounded inputs, ``[..., N]`` in the dtype of `x`."""
        if isinstance(x, QuantizedRows):
            return self.multiply(x, bias)
        rows = x.reshape(-1, x.shape[-1])
        return self.multiply(self.quantize(rows), bias).view(*x.shape[:-1], -1)

    def ordered(self, order: torch.Tensor) -> "Int8Linear":
        """The layer whose column i is column ``order[i]``; its weight is written in place."""
        self.weight.copy_(self.weight[:, order])
        bias = None if self.sum_bias is None else self.sum_bias[order]
        return replace(self, weight_scale=self.weight_scale[order], sum_bias=bias)

    def quantize(self, x: torch.Tensor) -> QuantizedRows:
        """Round rows ``[T, K]`` to int8."""
        raise NotImplementedError

    def multiply(self, rows: QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """Products ``[T, N]`` of rows that are rounded already."""
        raise NotImplementedError


class TorchInt8Linear(Int8Linear):
    """On the CPU; also the definition of what NPUs are to compute."""

    def quantize(self, x: torch.Tensor) -> QuantizedRows:
        """As `quantize_tokens`, or `quantize_all` with the layer's scale."""
        if self.input_scale is None:
            return QuantizedRows(*quantize_tokens(x), x.dtype)
        assert self.input_offset is not None
        return QuantizedRows(quantize_all(x, self.input_scale, self.input_offset), None, x.dtype)

    def multiply(self, rows: QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """int32 sums, then scales in float32."""
        sums = torch._int_mm(rows.values.contiguous(), self.weight)  # int32 [T, N]
        if self.sum_bias is not None:
            sums = sums + self.sum_bias
        product = sums.float() * self.weight_scale
        if rows.scale is not None:
            product *= rows.scale[:, None]
        if bias is not None:
            product += bias
        return product.to(rows.dtype)


class NPUInt8Linear(Int8Linear):
    """Two launches: one rounds the input, one multiplies."""

    def quantize(self, x: torch.Tensor) -> QuantizedRows:
        """``npu_dynamic_quant``, or ``npu_quantize`` that divides by the scale.

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
        """``npu_quant_matmul``, with the bias if its combination of dtypes has a place for it."""
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
    """Weights that were int8 in the checkpoint, and multiply inputs that are not rounded.

    Attributes
    ----------
    weight
        ``[N, K]``, in the dtype of the model.
    """

    weight: torch.Tensor

    def __call__(
        self,
        x: torch.Tensor,  # [..., K]
        bias: torch.Tensor | None = None,  # [N]
    ) -> torch.Tensor:
        """``x @ weight.T + bias``, ``[..., N]``."""
        return torch.nn.functional.linear(x, self.weight, bias)


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to int8 with a scale of its own.

    Parameters
    ----------
    x
        ``[..., K]``, any float dtype.

    Returns
    -------
    values
        int8, of the shape of `x`.
    scale
        float32 ``[...]``: the largest magnitude of a row is 127 of it. 0 for rows of zeros.
    """
    rows = x.float()
    scale = rows.abs().amax(-1) / LEVELS
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (rows / steps[..., None]).round().to(torch.int8), scale


def quantize_all(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Round to int8 with one scale and offset; what lies outside is cut off.

    Parameters
    ----------
    x
        Any shape and float dtype.
    scale, offset
        float32 ``[1]`` and integer ``[1]``.
    """
    return ((x.float() / scale).round() + offset).clamp(-128, 127).to(torch.int8)


def int8_linear(layer: Int8Linear, dtype: torch.dtype) -> Int8Linear:
    """The implementation for the device that holds a layer's weights.

    Parameters
    ----------
    layer
        Weights and scales, float32.
    dtype
        Of the model.
    """
    kind = TorchInt8Linear if layer.weight.device.type == "cpu" else NPUInt8Linear
    scale = layer.weight_scale.contiguous()
    if kind is NPUInt8Linear and layer.is_static and dtype == torch.float16:
        # Without a scale for each token, float16 results want the scale's bits in int64; given
        # float32, torch_npu would convert it in every call, a launch more.
        scale = scale.view(torch.int32).to(torch.int64)
    return kind(**{**vars(replace(layer, weight_scale=scale))})
