"""Mixtures of experts with int8 or int4 weights: products on NPUs, and the methods that vLLM calls.

Weights of each expert have a scale for each output channel, those of int4 perhaps for each group of
inputs. Its inputs, and the rows between its two products, get a scale for each token (dynamic), or
stay as they are (W4A16). NPUs multiply the latter by packed weights. What files have of experts is
in `expert_forms`.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.utils import set_weight_attrs

from vllm_npu_prep.ops.moe_method import (
    ExpertsMethod,
    GroupedExperts,
    TorchMoEMethod,
    activation_of,
    refuse_other_experts,
    sum_of_experts,
)
from vllm_npu_prep.ops.npu.experts import Rows, UnquantisedExperts, grouped_product
from vllm_npu_prep.ops.npu.switches import is_fused
from vllm_npu_prep.quantization.expert_forms import Int8Form, WordsOfExperts
from vllm_npu_prep.quantization.int4 import load_nothing
from vllm_npu_prep.quantization.int8 import TorchInt8Linear, swiglu_may_round
from vllm_npu_prep.quantization.modules import KnowsModules

<<<<<<< HEAD
=======
FLOAT = torch.float32
"""The dtype of scales, whatever dtype the model has."""
>>>>>>> review-words
BY_CHANNEL = FusedMoeWeightScaleSupported.CHANNEL


class NPUInt8Experts:
    """Weights of a layer's experts for grouped products; routing rounds the rows.

    vLLM's layer has int8 weights in the shapes that `UnquantisedExperts` of `ops.npu.experts`
    names, and scales ``[num_local_experts, outputs, 1]``.
    """

    quant_mode = 1  # of `npu_moe_init_routing_v2`: a scale for each row

    def __init__(self, layer: Any, dtype: torch.dtype, in_one_launch: bool) -> None:
        self.layer, self.dtype = layer, dtype
        is_silu = layer.activation == MoEActivation.SILU
        columns = self.outputs() // 2
        self.in_one_launch = in_one_launch and is_silu and swiglu_may_round(columns, False)
        self.activate = activation_of(layer.activation)
        self.make()

    def outputs(self) -> int:
        """Return how many outputs an expert's first product has."""
        return int(self.layer.w13_weight.shape[1])

    def make(self) -> None:
        """Make what products take besides the layer's parameters."""
        # For bfloat16 results the operator wants bfloat16 scales, for float16 results float32.
        kind = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        scales = self.layer.w13_weight_scale, self.layer.w2_weight_scale
        self.w13_scale, self.w2_scale = (s.detach().squeeze(-1).to(kind) for s in scales)

    def refresh(self) -> None:
        """Copy the layer's new scales to where graphs read them."""
        self.w13_scale.copy_(self.layer.w13_weight_scale.squeeze(-1))
        self.w2_scale.copy_(self.layer.w2_weight_scale.squeeze(-1))

    def derived(self) -> tuple[torch.Tensor, ...]:
        return self.w13_scale, self.w2_scale

    def up(self, rows: Rows) -> torch.Tensor:
        return self._product(rows, "w13")

    def between(self, rows: Rows, hidden: torch.Tensor) -> Rows:
        """Activate and round; rows past the last group stay undefined."""
        if not self.in_one_launch:
            return self.rounded(rows, self.activate(hidden))
        values, scales = torch.ops.npu.npu_dequant_swiglu_quant(
            hidden, activate_left=True, quant_mode=1
        )
        return rows._replace(values=values, scales=scales)

    def rounded(self, rows: Rows, activated: torch.Tensor) -> Rows:
        values, scales = torch.ops.npu.npu_dynamic_quant(activated)
        return rows._replace(values=values, scales=scales)

    def down(self, rows: Rows) -> torch.Tensor:
        return self._product(rows, "w2")

    def _product(self, rows: Rows, name: str) -> torch.Tensor:
        return grouped_product(
            rows,
            getattr(self.layer, f"{name}_weight").transpose(1, 2),
            scale=[getattr(self, f"{name}_scale")],
            per_token_scale=[rows.scales],
            output_dtype=self.dtype,
        )


class NPUW4A8Experts(NPUInt8Experts):
    """Packed weights of a layer's experts for grouped products of rounded rows.

    vLLM's layer has ``w13_weight`` and ``w2_weight``, int32 ``[num_local_experts, K, N / 8]``,
    ``w13_group_scale`` and ``w2_group_scale``, int64 ``[num_local_experts, G, N]``, and
    ``w13_correction`` and ``w2_correction``, float32 ``[num_local_experts, N]``, as
    `int4.words_of_levels` makes them; vllm-project/vllm-ascend makes the same call
    (``ops/fused_moe/moe_mlp.py``).
    """

    def outputs(self) -> int:
        return int(self.layer.w13_group_scale.shape[2])

    def make(self) -> None:
        """Make nothing: products take the layer's parameters alone."""

    refresh = make

    def derived(self) -> tuple[torch.Tensor, ...]:
        return ()

    def _product(self, rows: Rows, name: str) -> torch.Tensor:
        return grouped_product(
            rows,
            getattr(self.layer, f"{name}_weight"),
            scale=[getattr(self.layer, f"{name}_group_scale")],
            bias=[getattr(self.layer, f"{name}_correction")],
            per_token_scale=[rows.scales],
            output_dtype=self.dtype,
        )


class NPUInt4Experts(UnquantisedExperts):
    """Packed weights of a layer's experts for grouped products of rows that are not rounded.

    vLLM's `layer` has ``w13_weight`` and ``w2_weight``, int32 ``[num_local_experts, K, N / 8]``,
    and scales and offsets ``[num_local_experts, G, N]`` in the dtype of the rows, without G if a
    group has all inputs. The operator wants offsets of symmetric weights, too (cann/ops-transformer
    of November 2025, ``CheckGroupedMatmulAntiQuant`` in ``aclnn_grouped_matmul.cpp``);
    vllm-project/vllm-ascend makes the same call (``ops/fused_moe/moe_mlp.py``).
    """

    def up(self, rows: Rows) -> torch.Tensor:
        return self._product(rows, "w13")

    def down(self, rows: Rows) -> torch.Tensor:
        return self._product(rows, "w2")

    def _product(self, rows: Rows, name: str) -> torch.Tensor:
        return grouped_product(
            rows,
            getattr(self.layer, f"{name}_weight"),
            antiquant_scale=[getattr(self.layer, f"{name}_group_scale")],
            antiquant_offset=[getattr(self.layer, f"{name}_group_offset")],
        )


<<<<<<< HEAD
=======
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


>>>>>>> review-words
class Int8Experts(ExpertsMethod):
    """vLLM's method for experts of int8 inputs, and of int8 weights, or int4 ones kept as int8."""

    _weights: NPUInt8Experts | None = None
    apply = ExpertsMethod.routed

    def __init__(self, layer: Any, config: KnowsModules, form: Int8Form) -> None:
        super().__init__(layer.moe_config)
        self.config, self.form = config, form
        self._in_one_launch = is_fused("int8_swiglu")

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        self.dtype = _create(self, layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep weights and scales in the form by which the device multiplies."""
        for name in ("w13", "w2"):
            self.form.finish(layer, name)
        kind = NPUInt8Experts
        if self._is_fused and self.form.pack_rounded(layer):
            kind = NPUW4A8Experts
        if self._weights is not None:
            self._weights.refresh()
        elif self._is_fused:
            self._weights = kind(layer, self.dtype, self._in_one_launch)
            self.grouped = GroupedExperts.of(layer, self._weights, self._finalize)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: no kernel of vLLM computes these experts."""
        del layer

    def derived(self) -> tuple[torch.Tensor, ...]:
        return () if self._weights is None else self._weights.derived()

    def one_by_one(self, layer: Any, x: torch.Tensor, *pairs: Any) -> torch.Tensor:
        topk_weights, topk_ids, activation, *rest = pairs
        w13_scale, w2_scale = (
            each.squeeze(-1) if each.shape[-1] == 1 else each.transpose(1, 2)  # [E, N], [E, G, N]
            for each in (layer.w13_weight_scale, layer.w2_weight_scale)
        )

        def first(expert: int, rows: torch.Tensor) -> torch.Tensor:
            return TorchInt8Linear(layer.w13_weight[expert].t(), w13_scale[expert])(rows)

        def second(expert: int, rows: torch.Tensor) -> torch.Tensor:
            return TorchInt8Linear(layer.w2_weight[expert].t(), w2_scale[expert])(rows)

        products = first, activation_of(activation), second
        pairs = topk_weights, topk_ids, *rest
        return sum_of_experts(x, len(layer.w13_weight), *products, *pairs)


class Int4Experts(TorchMoEMethod):
    """vLLM's method for experts of int4 weights whose inputs stay as they are.

    Weights stay packed where NPUs multiply by them; else they are dequantised when they are loaded.
    """

    def __init__(self, layer: Any, config: KnowsModules, form: WordsOfExperts) -> None:
        super().__init__(layer.moe_config)
        self.config, self.form = config, form
        form.packs_outputs |= self._is_fused

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        self.dtype = _create(self, layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        bring = self.form.pack if self._is_fused else self.form.dequantize
        for name in ("w13", "w2"):
            bring(layer, name, self.dtype)
        if self._is_fused:
            weights = NPUInt4Experts(layer, self._activation(layer))
            self.grouped = GroupedExperts.of(layer, weights, self._finalize)
        else:
            super().process_weights_after_loading(layer)


def _create(
    method: Int8Experts | Int4Experts,
    layer: Any,
    num_experts: int,
    hidden_size: int,
    intermediate_size_per_partition: int,
    params_dtype: torch.dtype,
    **attributes: Any,
) -> torch.dtype:
    """Add what files fill to vLLM's layer, and return the model's dtype.

    vLLM's loader cuts what groups have as it cuts weights. Where a parameter is empty, the files
    have something that follows from the others. It stays with the layer: a file may have it after
    all else.
    """
    refuse_other_experts("quantised experts", layer, method.moe)
    inner, form = intermediate_size_per_partition, method.form
    parts = [inner] * (2 if method.moe.is_act_and_mul else 1)
    for name, outputs, inputs in (("w13", parts, hidden_size), ("w2", [hidden_size], inner)):
        form.refuse_cut(layer, outputs, inputs)
        for kind, data in form.parameters(num_experts, sum(outputs), inputs).items():
            parameter = nn.Parameter(data, requires_grad=False)
            cut = FusedMoeWeightScaleSupported.GROUP if kind in form.of_groups else BY_CHANNEL
            loader = attributes["weight_loader"] if data.numel() else load_nothing
            own = {
                "quant_method": cut.value,
                "is_transposed": form.inputs_first,
                "weight_loader": method.config.before_loading(loader),
            }
            set_weight_attrs(parameter, {**attributes, **own})
            layer.register_parameter(f"{name}_{kind}", parameter)
    return params_dtype
