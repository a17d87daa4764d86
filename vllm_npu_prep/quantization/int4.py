"""Linear layers of four-bit weights, whose inputs are rounded to int8 (W4A8) or not (W4A16).

Weights are numbers from 0 to 15, eight of them in an int32, the first in its lowest bits. A group
of inputs, or all inputs of an output channel, has a scale and a zero point, which is 8 where none
is written. A weight is ``(number - zero point) * scale``.

With rounded inputs, weights are levels from -8 to 7. NPUs multiply by packed levels where their
operators take them (`fits_rounded_rows`); elsewhere levels are int8, and `Int8Linear` multiplies.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A8Int,
    CompressedTensorsWNA8Int,
)
from vllm.scalar_type import scalar_types

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.formats import GROUP_ON_NPUS
from vllm_npu_prep.quantization.int8 import Int8Linear, NPUInt8Linear, QuantizedRows
from vllm_npu_prep.quantization.loaded import add_int8, check_scales, dtype_of, name_of

PACKED = 8
"""Numbers of an int32."""

SYMMETRIC_ZERO = 8

PIECE = 1 << 22
"""How many weights are unpacked at once: each takes up to 16 bytes for a moment."""


MOST_INPUTS = 18432
"""How many rounded inputs NPUs multiply by packed weights: the limit of grouped products in CANN
8.5 to 9.1, and of other products in 8.5."""

INPUTS_OF_EXPERTS = 64
"""Rounded inputs of experts are a multiple of it, if a scale serves all."""


def unpack(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the numbers in a matrix of int32, int32 as well, eight times as many along `dim`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    words = packed.movedim(dim, -1)
    return ((words[..., None] >> shifts) & 15).flatten(-2).movedim(-1, dim)


def inputs_of(packed: Any) -> int:
    """Return the inputs of a weight in int32, a parameter of vLLM's, which packs them."""
    return packed.shape[packed.input_dim] * PACKED


def pieces(packed: Any, outputs: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield which outputs of a weight come next, and their numbers, int32 ``[n, K]``."""
    words = packed.data if packed.output_dim == 0 else packed.data.t()
    step = max(PIECE // inputs_of(packed) // PACKED, 1) * PACKED
    for start in range(0, outputs, step):
        part = slice(start, min(start + step, outputs))
        yield part, unpack(words[part], 1)


def levels_in(weight: Any, outputs: int) -> torch.Tensor:
    """Return levels from -8 to 7 in int8, ``[N, K]``, in which some files have them already."""
    if weight.dtype == torch.int8:
        return weight.data
    levels = weight.new_empty(outputs, inputs_of(weight), dtype=torch.int8)
    for part, numbers in pieces(weight, outputs):
        levels[part] = numbers - SYMMETRIC_ZERO
    return levels


def levels_of_pairs(pairs: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the levels from -8 to 7 in int8, twice as many along `dim`.

    A byte has the first level in its low half, and the second in its high half. Shifting to the
    right keeps the sign.
    """
    return torch.stack(((pairs << 4) >> 4, pairs >> 4), dim + 1).flatten(dim, dim + 1)


def load_nothing(*args: Any, **kwargs: Any) -> bool:
    """Leave out a tensor that follows from others; it counts as loaded."""
    del args, kwargs
    return True


def dequantize_groups(
    numbers: torch.Tensor,  # int32 [N, K]
    scale: torch.Tensor,  # [N, number of groups]
    zero: "torch.Tensor | int",  # int32 [N, number of groups], or one for all
) -> torch.Tensor:
    """Return weights, float32 ``[N, K]``."""
    groups = numbers.unflatten(1, (scale.shape[1], -1))
    zeros = zero[..., None] if isinstance(zero, torch.Tensor) else zero
    return ((groups - zeros) * scale.float()[..., None]).flatten(1)


class Int4LinearKernel(MPLinearKernel):
    """Linear layers of four-bit weights, for all of vLLM's readers of such files.

    Where inputs are not rounded, a layer of the CPU fallback has its weights in the model's dtype
    once they are loaded: a product with them is quicker there than one of int8. NPUs multiply by
    packed ones, except of projections that latent attention's decodes absorb.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # only CUDA devices have a capability

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Take all that start-up has not refused by name."""
        wanted = (
            [scalar_types.uint4] if c.zero_points else [scalar_types.uint4b8, scalar_types.int4]
        )
        if c.weight_type in wanted:
            return True, None
        return False, f"{c.weight_type} is none of {wanted}"

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace packed weights by those that the layer multiplies by."""
        packed, scale, zero = params = list[Any](self._get_weight_params(layer))
        scales = scale.data if scale.output_dim == 0 else scale.data.t()
        check_scales(layer, self.w_s_name, scales, of_groups=True)
        zeros: torch.Tensor | None = None
        if self.config.zero_points:
            zeros = unpack(zero.data, zero.packed_dim)
            zeros = zeros if zero.output_dim == 0 else zeros.t()
        for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            if any(parameter is each for each in params):
                delattr(layer, name)
        if rounds_inputs(layer):
            add_levels(layer, levels_in(packed, len(scales)), scales.float())
        elif multiplies_packed(layer, scales.device):
            add_packed(layer, packed, scales, zeros)
        else:
            weight = scales.new_empty(len(scales), inputs_of(packed), dtype=dtype_of(layer))
            for part, numbers in pieces(packed, len(scales)):
                zero = SYMMETRIC_ZERO if zeros is None else zeros[part]
                weight[part] = dequantize_groups(numbers, scales[part], zero)
            layer.weight = nn.Parameter(weight, requires_grad=False)

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if rounds_inputs(layer):
            return layer.int8(x, bias)
        if layer.weight.dtype == torch.int32:
            return multiply_packed(layer, x, bias)
        return torch.nn.functional.linear(x, layer.weight, bias)


def multiplies_packed(layer: Any, device: torch.device) -> bool:
    """Return whether a layer multiplies by packed weights on a device, if their sizes allow it.

    Latent attention's decodes absorb ``kv_b_proj``, and take its weights apart.
    """
    return device.type != "cpu" and not name_of(layer).endswith("kv_b_proj")


def add_packed(layer: Any, packed: Any, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
    """Give a layer what ``npu_weight_quant_batchmatmul`` takes, in ND.

    Weights are int32 ``[K, N / 8]``: levels from -8 to 7, eight outputs in a word, the first in its
    lowest bits, as ``npu_convert_weight_to_int4pack`` puts them (vllm-project/vllm-ascend,
    ``quantization/methods/w4a8.py``, takes pairs in bytes as they are in place of its result).
    """
    weight = packed.new_empty(inputs_of(packed), len(scales) // PACKED)
    for part, numbers in pieces(packed, len(scales)):
        words = pack_outputs(numbers.t() - SYMMETRIC_ZERO)
        weight[:, part.start // PACKED : part.stop // PACKED] = words
    made = {"weight": weight, "group_scale": scales.t().to(dtype_of(layer))}
    if zeros is not None:
        made["group_offset"] = (SYMMETRIC_ZERO - zeros.t()).to(dtype_of(layer))
    for name, data in made.items():
        layer.register_parameter(name, nn.Parameter(data.contiguous(), requires_grad=False))


def pack_outputs(levels: torch.Tensor) -> torch.Tensor:
    """Return int32 ``[K, n / 8]`` of levels from -8 to 7, int32 ``[K, n]``."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=levels.device)
    fields = (levels & 15).unflatten(1, (-1, PACKED))  # [K, n / 8, 8]
    return (fields << shifts).sum(2, dtype=torch.int32)


def multiply_packed(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``x @ weight + bias`` in one launch; bfloat16 biases take one more."""
    groups = len(layer.group_scale)
    is_apart = bias is not None and bias.dtype == torch.bfloat16  # it would have to be float32
    product = torch.ops.npu.npu_weight_quant_batchmatmul(
        x.reshape(-1, x.shape[-1]),
        layer.weight,
        layer.group_scale,
        getattr(layer, "group_offset", None),
        bias=None if is_apart else bias,
        antiquant_group_size=len(layer.weight) // groups if groups > 1 else 0,
    ).view(*x.shape[:-1], -1)
    return product + bias if is_apart else product


def rounds_inputs(layer: Any) -> bool:
    """Return whether a layer's files ask for int8 inputs; AWQ's and GPTQ's never do."""
    scheme = getattr(layer, "scheme", None)
    return isinstance(scheme, CompressedTensorsW4A8Int | CompressedTensorsWNA8Int)


def add_levels(layer: Any, levels: torch.Tensor, scales: torch.Tensor) -> None:
    """Let a layer multiply rounded inputs by levels from -8 to 7.

    Levels are ``[N, K]``, scales float32 ``[N, number of groups]``.
    """
    outputs, inputs = levels.shape
    fits = fits_rounded_rows(outputs, inputs, scales.shape[1], whole=GROUP_ON_NPUS)
    if fits and multiplies_packed(layer, levels.device):
        # The kernel of CANN 8.5 takes groups only, so all groups of a channel have its scale.
        groups = inputs // GROUP_ON_NPUS
        words = words_of_levels(levels, scales.expand(-1, groups))
        layer.weight = nn.Parameter(words.weight, requires_grad=False)
        layer.channel_scale = scales.contiguous()
        layer.int8 = NPUInt4Linear(layer.weight.data, words.scale, correction=words.correction)
        return
    weight = levels.to(torch.int8).contiguous()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    by_channel = scales.shape[1] == 1
    scale = scales[:, 0] if by_channel else scales.t()
    add_int8(layer, Int8Linear(layer.weight.data.t(), scale.contiguous()), scales.contiguous())


def fits_rounded_rows(outputs: int, inputs: int, groups: int, whole: int) -> bool:
    """Return whether NPUs multiply rounded inputs by such weights when they are packed.

    Inputs have to be a multiple of `whole` if a scale serves all.
    """
    size = whole if groups == 1 else GROUP_ON_NPUS
    is_known = groups == 1 or groups * size == inputs
    return is_known and inputs % size == 0 and inputs <= MOST_INPUTS and outputs % PACKED == 0


class PackedLevels(NamedTuple):
    """Weights of rounded inputs as NPUs multiply by them."""

    weight: torch.Tensor  # int32 [K, N / 8]
    scale: torch.Tensor  # int64 [G, N]: the bits of float32, below 32 zeros
    correction: torch.Tensor  # float32 [N]


def words_of_levels(levels: torch.Tensor, scales: torch.Tensor) -> PackedLevels:
    """Pack levels ``[N, K]`` with scales float32 ``[N, G]``.

    The kernels take a row for ``16 * upper + lower + 8``, upper and lower four bits from -8 to 7
    each. They multiply by these bits, and get what the 8 adds: 8 times the sum of each output's
    scaled weights. They read 19 bits of a scale, so both are computed with a scale rounded to them.
    The 32 bits above a scale have meanings of their own, so they are 0, of negative scales, too
    (cann/ops-transformer, ``grouped_matmul_antiquant_a8w4_msd.h``; cann/ops-nn,
    ``quant_batch_matmul_v4_msd.h`` and the page of ``aclnnTransQuantParamV2``).
    """
    outputs, inputs = levels.shape
    bits = (scales.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF  # [N, G]
    weight = levels.new_empty(inputs, outputs // PACKED, dtype=torch.int32)
    sums = torch.empty_like(bits)
    step = max(PIECE // inputs // PACKED, 1) * PACKED
    for start in range(0, outputs, step):
        part = levels[start : start + step].int()
        sums[start : start + step] = part.unflatten(1, (bits.shape[1], -1)).sum(2).int()
        end = start + len(part)
        weight[:, start // PACKED : end // PACKED] = pack_outputs(part.t())
    correction = 8 * (sums * bits.view(torch.float32)).sum(1)
    scale = bits.t().long() & 0xFFFFFFFF  # long() repeats the sign
    return PackedLevels(weight, scale.contiguous(), correction)


@dataclass(frozen=True)
class NPUInt4Linear(NPUInt8Linear):
    """A layer of packed levels on an NPU, in two launches; a bias takes one more.

    ``weight`` is int32 ``[K, N / 8]``, ``weight_scale`` int64 ``[K / 256, N]``.

    Attributes
    ----------
    correction
        float32 ``[N]``, see `words_of_levels`.
    """

    correction: torch.Tensor | None = None

    def ordered(self, order: torch.Tensor) -> "NPUInt4Linear":
        assert self.correction is not None
        for part in self.weight.split(max(PIECE // len(order), 1)):
            part.copy_(pack_outputs(unpack(part, 1)[:, order]))
        scale, correction = self.weight_scale[:, order], self.correction[order]
        return replace(self, weight_scale=scale, correction=correction)

    def multiply(self, rows: QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
        assert rows.scale is not None
        product = torch.ops.npu.npu_quant_matmul(
            rows.values,
            self.weight,
            self.weight_scale,
            offset=self.correction,
            pertoken_scale=rows.scale[:, None],
            output_dtype=rows.dtype,
            group_sizes=[0, 0, GROUP_ON_NPUS],
        )
        return product if bias is None else product + bias


def refuse_unmultiplied(layer: nn.Module, group_size: int, inputs: int, outputs: list[int]) -> None:
    """Raise before weights are loaded if NPUs can't multiply rounded inputs by a rank's groups."""
    fits = fits_rounded_rows(sum(outputs), inputs, inputs // group_size, group_size)
    if torch.get_default_device().type != "cpu" and not fits:
        raise PrepError(
            f"{name_of(layer)}: a rank has {inputs} of its inputs and {outputs} of its outputs; "
            f"beside int8 inputs, NPUs take groups of {GROUP_ON_NPUS} four-bit weights, at most "
            f"{MOST_INPUTS} inputs, and outputs in multiples of {PACKED}; use another "
            "--tensor-parallel-size"
        )


def refuse_cut_groups(
    layer: nn.Module,
    group_size: int,
    inputs: int,
    outputs: list[int],
    outputs_are_packed: bool = False,
) -> None:
    """Raise where the border between two ranks lies in a group, or in an int32.

    Parameters
    ----------
    group_size
        Inputs of a group; -1 for one group of all.
    inputs, outputs
        How many inputs a rank has, and how many outputs of each part of a fused layer.
    outputs_are_packed
        Whether outputs are, too: in zero points, and in weights that NPUs multiply by.
    """
    whole = PACKED if group_size == -1 else group_size
    if inputs % whole:
        raise PrepError(
            f"{name_of(layer)}: a rank has {inputs} of its inputs, which are not whole groups of "
            f"{whole} four-bit weights; use another --tensor-parallel-size"
        )
    if outputs_are_packed and any(size % PACKED for size in outputs):
        raise PrepError(
            f"{name_of(layer)}: a rank has {outputs} of its outputs, which are packed by "
            f"{PACKED}; use another --tensor-parallel-size"
        )


def refuse_odd(layer: nn.Module, outputs: list[int]) -> None:
    """Raise where the border between two ranks lies in a byte that has two outputs."""
    if any(size % 2 for size in outputs):
        raise PrepError(
            f"{name_of(layer)}: a rank has {outputs} of its outputs, which lie in bytes by two; "
            "use another --tensor-parallel-size"
        )
