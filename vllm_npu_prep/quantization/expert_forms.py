"""What files have of experts in int8 or int4, by compressed-tensors, ModelSlim, AWQ and GPTQ.

A form makes the parameters that files fill, checks what they were filled with, and leaves what the
products of `experts` take.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from vllm_npu_prep.quantization.checkpoint import Int4Form
from vllm_npu_prep.quantization.int4 import (
    INPUTS_OF_EXPERTS,
    PACKED,
    SYMMETRIC_ZERO,
    dequantize_groups,
    fits_rounded_rows,
    levels_of_pairs,
    pack_outputs,
    refuse_cut_groups,
    refuse_odd,
    refuse_unmultiplied,
    unpack,
    words_of_levels,
)
from vllm_npu_prep.quantization.loaded import check_offsets, check_scales

FLOAT = torch.float32
"""The dtype of scales, whatever dtype the model has."""
SECOND = ("weight_scale_second", "weight_offset_second")
"""What ModelSlim's groups have; offsets are 0."""
PACKED_KINDS = ("weight_packed", "weight_scale", "weight_zero_point")
"""Parameters of which weights are dequantised."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ's words have each of eight outputs."""


class Int8Form:
    """What files have of experts: levels in int8, and a scale for each output channel.

    ModelSlim's files have offsets of weights, compressed-tensors' don't.
    """

    of_groups: Collection[str] = ()  # parameters that are cut as weights are
    inputs_first = False  # whether files have inputs before outputs

    def __init__(self, has_offsets: bool = False) -> None:
        self.has_offsets = has_offsets

    def refuse_cut(self, layer: Any, outputs: list[int], inputs: int) -> None:
        """Raise where the border of two ranks lies in what belongs together.

        `outputs` are those of each part of a weight.
        """

    def parameters(self, experts: int, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        """Make what files fill, by the ends of its names; what is empty follows from the rest."""
        made = {"weight": torch.empty(experts, outputs, inputs, dtype=torch.int8)}
        names = ("weight_scale", "weight_offset") if self.has_offsets else ("weight_scale",)
        return made | {name: torch.zeros(experts, outputs, 1, dtype=FLOAT) for name in names}

    def finish(self, layer: Any, name: str) -> None:
        """Check scales of ``w13`` or ``w2``, and leave int8 weights and float32 scales.

        Scales that are not positive, and weights with an offset, are refused.
        """
        check_scales(layer, f"weight_scale ({name})", _of(layer, name, "weight_scale"))
        if self.has_offsets:
            check_offsets(layer, _of(layer, name, "weight_offset"))

    def pack_rounded(self, layer: Any) -> bool:
        """Pack levels of four bits for NPUs, and return whether they are packed now."""
        return False


class Int4OfRounded(Int8Form):
    """Levels of four bits, which NPUs multiply by rounded rows."""

    def pack_rounded(self, layer: Any) -> bool:
        names = ("w13", "w2")
        for name in names:
            _, outputs, inputs = _of(layer, name, "weight").shape
            groups = _of(layer, name, "weight_scale").shape[2]
            if not fits_rounded_rows(outputs, inputs, groups, whole=INPUTS_OF_EXPERTS):
                return False
        for name in names:
            levels, scales = _of(layer, name, "weight"), _of(layer, name, "weight_scale")
            packed = [words_of_levels(*pair) for pair in zip(levels, scales)]
            weight, scale, correction = (torch.stack(parts) for parts in zip(*packed))
            made = {"weight": weight, "group_scale": scale, "correction": correction}
            _replace(layer, name, ("weight_scale",), **made)
        return True


class ModelSlimInt4(Int4OfRounded):
    """Levels of four bits, two outputs in a byte or one, and perhaps second scales of groups."""

    def __init__(self, form: Int4Form) -> None:
        super().__init__(has_offsets=True)
        self.in_pairs, self.group_size = form
        self.of_groups = SECOND

    def refuse_cut(self, layer: Any, outputs: list[int], inputs: int) -> None:
        if self.group_size:
            refuse_cut_groups(layer, self.group_size, inputs, outputs)
            refuse_unmultiplied(layer, self.group_size, inputs, outputs)
        if self.in_pairs:
            refuse_odd(layer, outputs)

    def parameters(self, experts: int, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        made = super().parameters(experts, outputs, inputs)
        if self.in_pairs:
            made["weight"] = torch.empty(experts, outputs // 2, inputs, dtype=torch.int8)
        if self.group_size:
            sizes = experts, outputs, inputs // self.group_size
            lacks = dict(zip(SECOND, (torch.nan, 0.0)))
            made |= {k: torch.full(sizes, lack, dtype=FLOAT) for k, lack in lacks.items()}
        return made | {"scale_bias": torch.empty(0)}

    def finish(self, layer: Any, name: str) -> None:
        super().finish(layer, name)
        levels, scale = _of(layer, name, "weight"), _of(layer, name, "weight_scale")
        if self.group_size:
            second = _of(layer, name, "weight_scale_second")
            check_scales(layer, f"weight_scale_second ({name})", second, of_groups=True)
            check_offsets(layer, _of(layer, name, "weight_offset_second"))
            scale = scale * second
        levels = levels_of_pairs(levels, 1) if self.in_pairs else levels
        _replace(layer, name, SECOND, weight=levels, weight_scale=scale)


class WordsOfExperts(Int4OfRounded):
    """Numbers of four bits, eight in an int32."""

    gone: tuple[str, ...] = ()
    """Parameters that are gone once weights are packed or dequantised; weights come first."""
    size = -1
    """Inputs of a group; -1 for one group of all."""
    packs_outputs = False

    def experts_of(
        self, layer: Any, name: str
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor, "torch.Tensor | int"]]:
        """Check scales, and yield each expert's numbers, scales and zero points.

        Numbers are int32 ``[N, K]``, scales ``[N, G]``, zero points int32 ``[N, G]`` or one of all.
        """
        raise NotImplementedError

    def dequantize(self, layer: Any, name: str, dtype: torch.dtype) -> None:
        """Leave weights in the model's dtype."""
        weight: torch.Tensor | None = None
        for expert, each in enumerate(self.experts_of(layer, name)):
            one = dequantize_groups(*each)
            if weight is None:
                count = len(_of(layer, name, self.gone[0]))
                weight = one.new_empty(count, *one.shape, dtype=dtype)
            weight[expert] = one
        assert weight is not None
        _replace(layer, name, self.gone, weight=weight)

    def pack(self, layer: Any, name: str, dtype: torch.dtype) -> None:
        """Leave what `NPUInt4Experts` multiplies by."""
        made: dict[str, list[torch.Tensor]] = {"weight": [], "group_scale": [], "group_offset": []}
        for numbers, scale, zero in self.experts_of(layer, name):
            made["weight"].append(pack_outputs(numbers.t() - SYMMETRIC_ZERO))
            offset = torch.zeros_like(scale) + (SYMMETRIC_ZERO - zero)
            for kind, each in (("group_scale", scale), ("group_offset", offset)):
                groups = each.t().to(dtype)
                made[kind].append(groups if self.size != -1 else groups[0])
        stacked = {kind: torch.stack(parts) for kind, parts in made.items()}
        _replace(layer, name, self.gone, **stacked)


class CompressedInt4(WordsOfExperts):
    """compressed-tensors' numbers of four bits, eight in an int32, or levels alone in int8.

    `scheme` is what ``config.json`` says of weights.
    """

    gone = PACKED_KINDS

    def __init__(self, scheme: Any, is_packed: bool, rounds: bool) -> None:
        super().__init__()
        self.rounds = rounds
        self.size, self.has_zeros = scheme.group_size or -1, not scheme.symmetric
        self.is_packed, self.packs_outputs = is_packed, self.has_zeros
        self.of_groups = () if self.size == -1 else ("weight_scale", "weight_zero_point")

    def refuse_cut(self, layer: Any, outputs: list[int], inputs: int) -> None:
        if self.is_packed or self.size != -1:
            refuse_cut_groups(layer, self.size, inputs, outputs, self.packs_outputs)
        if self.rounds and self.size != -1:
            refuse_unmultiplied(layer, self.size, inputs, outputs)

    def parameters(self, experts: int, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        groups = 1 if self.size == -1 else inputs // self.size
        made = {"weight_scale": torch.full((experts, outputs, groups), torch.nan, dtype=FLOAT)}
        if not self.is_packed:
            return {**super().parameters(experts, outputs, inputs), **made}
        words = torch.empty(experts, outputs, inputs // PACKED, dtype=torch.int32)
        made |= {"weight_packed": words, "weight_shape": torch.empty(0, dtype=torch.int64)}
        if self.has_zeros:
            zeros = torch.empty(experts, outputs // PACKED, groups, dtype=torch.int32)
            made["weight_zero_point"] = zeros
        return made

    def finish(self, layer: Any, name: str) -> None:
        """Check scales, and leave levels in int8 and float32 scales."""
        self._scale(layer, name)
        if self.is_packed:
            packed = _of(layer, name, "weight_packed")
            levels = packed.new_empty(*packed.shape[:2], packed.shape[2] * PACKED, dtype=torch.int8)
            for expert, words in enumerate(packed):
                levels[expert] = unpack(words, 1) - SYMMETRIC_ZERO
            _replace(layer, name, ("weight_packed",), weight=levels)

    def experts_of(
        self, layer: Any, name: str
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor, "torch.Tensor | int"]]:
        scale, packed = self._scale(layer, name), _of(layer, name, "weight_packed")
        for expert, zero in enumerate(self._zeros(layer, name)):
            yield unpack(packed[expert], 1), scale[expert], zero

    def _zeros(self, layer: Any, name: str) -> Iterable[Any]:
        """Return each expert's zero points, int32 ``[N, G]``, or the one of all groups."""
        if not self.has_zeros:
            return [SYMMETRIC_ZERO] * len(_of(layer, name, "weight_packed"))
        return (unpack(each, 0) for each in _of(layer, name, "weight_zero_point"))

    def _scale(self, layer: Any, name: str) -> torch.Tensor:
        scale = _of(layer, name, "weight_scale")
        check_scales(layer, f"weight_scale ({name})", scale, of_groups=True)
        return scale


class WordsOfMatrices(WordsOfExperts):
    """AWQ's and GPTQ's numbers of four bits, inputs before outputs.

    AWQ packs outputs, in an order of its own, and has zero points, which it packs alike. GPTQ packs
    inputs; its zero points are not read, as those of symmetric weights are 8.
    """

    gone = ("qweight", "scales", "qzeros")
    inputs_first = True
    packs_outputs = True

    def __init__(self, group_size: int, is_awq: bool) -> None:
        super().__init__()
        self.size, self.is_awq = group_size, is_awq
        self.of_groups = () if group_size == -1 else ("scales", "qzeros")

    def refuse_cut(self, layer: Any, outputs: list[int], inputs: int) -> None:
        refuse_cut_groups(layer, self.size, inputs, outputs, self.packs_outputs)

    def parameters(self, experts: int, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        groups = 1 if self.size == -1 else inputs // self.size
        words = (inputs, outputs // PACKED) if self.is_awq else (inputs // PACKED, outputs)
        return {
            "qweight": torch.empty(experts, *words, dtype=torch.int32),
            "scales": torch.full((experts, groups, outputs), torch.nan, dtype=FLOAT),
            "qzeros": torch.empty(experts, groups, outputs // PACKED, dtype=torch.int32),
            **({} if self.is_awq else {"g_idx": torch.empty(0)}),
        }

    def experts_of(
        self, layer: Any, name: str
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor, "torch.Tensor | int"]]:
        kinds = ("qweight", "scales", "qzeros")
        words, scales, zeros = (_of(layer, name, kind) for kind in kinds)
        check_scales(layer, f"scales ({name})", scales, of_groups=True)
        for expert, scale in enumerate(scales):
            if self.is_awq:
                yield _in_order(words[expert]).t(), scale.t(), _in_order(zeros[expert]).t()
            else:
                yield unpack(words[expert], 0).t(), scale.t(), SYMMETRIC_ZERO


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Return the numbers of AWQ's words, int32 ``[n, N]``, in the order of outputs."""
    return unpack(words, 1).unflatten(1, (-1, PACKED))[:, :, AWQ_PLACES].flatten(1)


def _of(layer: Any, name: str, kind: str) -> torch.Tensor:
    return getattr(layer, f"{name}_{kind}").detach()


def _replace(layer: Any, name: str, gone: Collection[str], **made: torch.Tensor) -> None:
    """Put tensors into the place of what the files had."""
    for kind in gone:
        if hasattr(layer, f"{name}_{kind}"):
            delattr(layer, f"{name}_{kind}")
    for kind, data in made.items():
        setattr(layer, f"{name}_{kind}", nn.Parameter(data, requires_grad=False))
