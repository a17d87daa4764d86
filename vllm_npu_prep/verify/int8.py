"""What quantised layers and experts call: rounding to int8, and products of int8.

Rounding may differ by a level where a number lies between two, so int8 results are compared as
fractions of their range. Products are compared as other results are.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.outcome import Outcome
from vllm_npu_prep.verify.row import (
    DTYPES,
    Probe,
    Put,
    Results,
    Row,
    RowContext,
    compare,
    row_of_probe,
    uniform,
)

EPSILON = 0.3
OFFSET = -20
WIDE = ((1, 7872), (49, 9216), (7, 28672))
"""Rows and columns of results that the operator takes in parts."""

STEP = 0.0234375
"""A static scale that is exact in bfloat16."""


def operators() -> Any:
    return torch.ops.npu


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _integers(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = _generator(seed)
    return torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)


def _words(levels: torch.Tensor) -> torch.Tensor:
    """Pack levels from -8 to 7, eight of the last dimension in an int32."""
    fields = (levels.long() & 15).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return fields.sum(-1).to(torch.int32)


def _dynamic(dtype: torch.dtype) -> Probe:
    x = uniform(5, 128, dtype=dtype) * torch.tensor([[1.0], [0.01], [30.0], [2.0], [0.3]]).to(dtype)

    def call(put: Put) -> Results:
        values, scale = operators().npu_dynamic_quant(put(x))
        return levels(values), scale

    def expected() -> Results:
        scale = x.double().abs().amax(-1) / 127
        return x.double() / scale[:, None] / 128, scale

    return Probe(call, expected)


def _static(dtype: torch.dtype) -> Probe:
    """Probe rounding with one scale; some numbers are beyond the ends of int8 and are cut off."""
    x = uniform(5, 128, dtype=dtype) * 2
    scale, offset = torch.tensor([STEP]), torch.tensor([OFFSET], dtype=torch.int32)

    def call(put: Put) -> Results:
        values = operators().npu_quantize(put(x), put(scale), put(offset), torch.qint8, -1, True)
        return (levels(values),)

    def expected() -> Results:
        return ((x.double() / STEP + OFFSET).clamp(-128, 127) / 128,)

    return Probe(call, expected)


def _product(dtype: torch.dtype, static: bool) -> Probe:
    """Probe a transposed weight, different scales, and a bias after scaling or in the sums."""
    x, weight = _integers(5, 96, 0), _integers(64, 96, 1)
    scale = torch.linspace(1, 3, 64) / 2**16
    tokens = None if static else torch.linspace(0.5, 2, 5)
    kind = torch.int32 if static else torch.float32
    bias = (torch.linspace(-1, 1, 64) * (20_000 if static else 1)).to(kind)
    given = scale
    if static and dtype == torch.float16:
        given = scale.view(torch.int32).long()

    def call(put: Put) -> Results:
        return (
            operators().npu_quant_matmul(
                put(x),
                put(weight).t(),
                put(given),
                pertoken_scale=None if tokens is None else put(tokens),
                bias=put(bias),
                output_dtype=dtype,
            ),
        )

    def expected() -> Results:
        sums = x.double() @ weight.double().T
        if tokens is None:
            return ((sums + bias) * scale.double(),)
        return (sums * scale.double() * tokens.double()[:, None] + bias,)

    return Probe(call, expected)


def _int4_product(dtype: torch.dtype, groups: int) -> Probe:
    """Probe weights of four bits, packed by outputs; groups have offsets, whole rows a bias.

    Some scales are negative, as tools choose them.
    """
    x, levels = uniform(5, 128, dtype=dtype), _integers(128, 64, 6) % 16 - 8
    scale = torch.linspace(-2, 3, groups * 64).view(groups, 64).to(dtype) / 64
    offset = (_integers(groups, 64, 7) % 16 - 8).to(dtype) if groups > 1 else None
    bias = uniform(64, dtype=dtype) if groups == 1 and dtype == torch.float16 else None

    def call(put: Put) -> Results:
        product = operators().npu_weight_quant_batchmatmul(
            put(x),
            put(_words(levels)),
            put(scale),
            None if offset is None else put(offset),
            bias=None if bias is None else put(bias),
            antiquant_group_size=128 // groups if groups > 1 else 0,
        )
        return (product,)

    def expected() -> Results:
        parts = levels.double().unflatten(0, (groups, -1))
        moved = parts if offset is None else parts + offset.double()[:, None]
        product = x.double() @ (moved * scale.double()[:, None]).flatten(0, 1)
        return (product if bias is None else product + bias.double(),)

    return Probe(call, expected)


SIZES = (2, 0, 3)
"""Rows of each expert, in probes of their products; one more row belongs to none."""


def _grouped(
    put: Put, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None, **scales: Any
) -> Results:
    """Multiply rows by the weights of their experts, which are on the device."""
    product = operators().npu_grouped_matmul(
        [put(x)],
        [weight],
        **{name: [put(each)] for name, each in scales.items()},
        group_list=put(torch.tensor(SIZES)),
        group_list_type=1,
        group_type=0,
        split_item=2,
        output_dtype=dtype,
    )[0]
    return (product[: sum(SIZES)],)


def _int4_experts_product(dtype: torch.dtype, groups: int) -> Probe:
    """Probe rows of experts, by packed weights that have offsets."""
    here = sum(SIZES)
    x, levels = uniform(here + 1, 128, dtype=dtype), _integers(3 * 128, 64, 8) % 16 - 8
    scale = torch.linspace(-2, 3, 3 * groups * 64).view(3, groups, 64).to(dtype) / 64
    offset = (_integers(3 * groups, 64, 9) % 16 - 8).view(3, groups, 64).to(dtype)

    def call(put: Put) -> Results:
        shape = (3, groups, 64) if groups > 1 else (3, 64)
        given = {"antiquant_scale": scale.view(shape), "antiquant_offset": offset.view(shape)}
        return _grouped(put, x, put(_words(levels).view(3, 128, 8)), None, **given)

    def expected() -> Results:
        parts = levels.double().view(3, groups, -1, 64) + offset.double()[:, :, None]
        weight = (parts * scale.double()[:, :, None]).flatten(1, 2)  # [E, k, n]
        expert = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))
        return (torch.einsum("tk,tkn->tn", x[:here].double(), weight[expert]),)

    return Probe(call, expected)


def _w4a8(groups: int, experts: int, inputs: int) -> tuple[torch.Tensor, ...]:
    """Return levels ``[E, k, 64]``, scales ``[E, G, 64]``, and what operators take of them.

    Scales have bits that the operators read, and every third is negative. Words have eight outputs
    each, scales are the bits of float32 in int64, and corrections are 8 times the sum of each
    output's scaled weights.
    """
    levels = _integers(experts * inputs, 64, 10).view(experts, inputs, 64) % 16 - 8
    scale = 2.0 ** -torch.randint(7, 10, (experts, groups, 64), generator=_generator(11))
    scale.view(-1)[::3] *= -1
    sums = levels.view(experts, groups, -1, 64).sum(2) * scale
    bits = scale.view(torch.int32).long() & 0xFFFFFFFF
    return levels, scale, _words(levels), bits, 8 * sums.sum(1)


def _w4a8_expected(
    x: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Multiply rows by levels ``[k, n]`` and their scales ``[G, n]``."""
    groups = levels.double().unflatten(0, (len(scale), -1)) * scale.double()[:, None]
    return (x.double() @ groups.flatten(0, 1)) * tokens.double()[:, None]


def _w4a8_product(dtype: torch.dtype) -> Probe:
    """Probe the product of packed weights of two groups and rows that have all numbers of int8."""
    x, tokens = _integers(5, 512, 12), torch.linspace(0.5, 2, 5) / 2**6
    levels, scale, words, bits, correction = _w4a8(2, 1, 512)

    def call(put: Put) -> Results:
        product = operators().npu_quant_matmul(
            put(x),
            put(words[0]),
            put(bits[0]),
            offset=put(correction[0]),
            pertoken_scale=put(tokens)[:, None],
            output_dtype=dtype,
            group_sizes=[0, 0, 256],
        )
        return (product,)

    return Probe(call, lambda: (_w4a8_expected(x, levels[0], scale[0], tokens),))


def _w4a8_experts_product(dtype: torch.dtype, groups: int, inputs: int) -> Probe:
    """Probe rounded rows of experts, by packed weights."""
    here = sum(SIZES)
    x, tokens = _integers(here + 1, inputs, 13), torch.linspace(0.5, 2, here + 1) / 2**6
    levels, scale, words, bits, correction = _w4a8(groups, 3, inputs)

    def call(put: Put) -> Results:
        given = {"scale": bits, "bias": correction, "per_token_scale": tokens}
        return _grouped(put, x, put(words), dtype, **given)

    def expected() -> Results:
        of_experts = ((0, slice(0, 2)), (2, slice(2, here)))
        products = [_w4a8_expected(x[r], levels[e], scale[e], tokens[r]) for e, r in of_experts]
        return (torch.cat(products),)

    return Probe(call, expected)


def _experts_product(dtype: torch.dtype) -> Probe:
    """Probe rounded rows of experts, by int8 weights."""
    here = sum(SIZES)
    x = _integers(here + 1, 96, 2)
    weight = torch.stack([_integers(64, 96, seed) for seed in (3, 4, 5)])  # [E, n, k]
    scale = (torch.linspace(1, 3, 3 * 64).view(3, 64) / 2**16).to(dtype)
    tokens = torch.linspace(0.5, 2, here + 1)

    def call(put: Put) -> Results:
        given = scale if dtype == torch.bfloat16 else scale.float()
        columns = put(weight).transpose(1, 2)
        return _grouped(put, x, columns, dtype, scale=given, per_token_scale=tokens)

    def expected() -> Results:
        expert = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))
        sums = torch.einsum("tk,tnk->tn", x[:here].double(), weight[expert].double())
        return (sums * scale[expert].double() * tokens[:here, None].double(),)

    return Probe(call, expected)


def norm(dtype: torch.dtype) -> Probe:
    """Probe the norms that round: with a scale for each token, and with one for all.

    With factors, as Gemma's norms have them, rows are added to themselves: a norm without residual.
    """
    x, y = uniform(5, 128, dtype=dtype), uniform(5, 128, dtype=dtype, seed=1)
    weight, factors = (uniform(128, dtype=dtype, seed=seed) for seed in (2, 3))
    is_half = dtype == torch.float16
    scales = torch.full((128,), STEP, dtype=torch.float32 if is_half else dtype)
    offsets = torch.full((128,), OFFSET, dtype=torch.int32 if is_half else dtype)

    def call(put: Put) -> Results:
        npu = torch.ops.npu
        values, _, total, scale, _ = npu.npu_add_rms_norm_dynamic_quant(
            put(x), put(y), put(weight), epsilon=EPSILON
        )
        static = npu.npu_add_rms_norm_quant(
            put(x), put(y), put(weight), put(scales), put(offsets), epsilon=EPSILON
        )
        alone, _, _, alone_scale, _ = npu.npu_add_rms_norm_dynamic_quant(
            put(x), put(x), put(weight), smooth_scale1=put(factors), epsilon=EPSILON
        )
        dynamic = levels(values), total, scale.to(dtype)
        return *dynamic, levels(alone), alone_scale.to(dtype), levels(static[0])

    def expected() -> Results:
        total = x.double() + y.double()
        normed = formulas.rms_norm(total, weight, EPSILON)
        scale = normed.abs().amax(-1) / 127
        alone = formulas.rms_norm(x.double(), weight, EPSILON / 4) * factors.double()
        alone_scale = alone.abs().amax(-1) / 127
        static = (normed / STEP + OFFSET).clamp(-128, 127)
        dynamic = normed / scale[:, None] / 128, total, scale
        return *dynamic, alone / alone_scale[:, None] / 128, alone_scale, static / 128

    return Probe(call, expected)


def swiglu(dtype: torch.dtype) -> Probe:
    """Probe the activation that rounds: with a scale for each token, and with one for all."""
    x = uniform(5, 128, dtype=dtype)

    def call(put: Put) -> Results:
        operator = torch.ops.npu.npu_dequant_swiglu_quant
        values, scale = operator(put(x), activate_left=True, quant_mode=1)
        static, _ = operator(
            put(x),
            quant_scale=put(torch.tensor([STEP])),
            quant_offset=put(torch.tensor([float(OFFSET)])),
            activate_left=True,
            quant_mode=0,
        )
        return levels(values), scale.to(dtype), levels(static)

    def expected() -> Results:
        product = formulas.swiglu(x)
        scale = product.abs().amax(-1) / 127
        static = (product / STEP + OFFSET).clamp(-128, 127)
        return product / scale[:, None] / 128, scale, static / 128

    return Probe(call, expected)


def _wide_swiglu(dtype: torch.dtype) -> Probe:
    """Probe the activation that rounds with rows wider than the plugin leaves to it.

    The last column of a row has its maximum, which a kernel that takes rows in parts meets last.
    """
    rows = [uniform(tokens, 2 * columns, dtype=dtype) for tokens, columns in WIDE]
    for x in rows:
        x[:, x.shape[1] // 2 - 1] = x[:, -1] = 4

    def call(put: Put) -> Results:
        operator = torch.ops.npu.npu_dequant_swiglu_quant
        results = [operator(put(x), activate_left=True, quant_mode=1) for x in rows]
        return tuple(part for got, scale in results for part in (levels(got), scale.to(dtype)))

    def expected() -> Results:
        products = [formulas.swiglu(x) for x in rows]
        scales = [product.abs().amax(-1) / 127 for product in products]
        pairs = zip(products, scales)
        return tuple(part for p, scale in pairs for part in (p / scale[:, None] / 128, scale))

    return Probe(call, expected)


def levels(values: torch.Tensor) -> torch.Tensor:
    """Return int8 as a fraction of its range, in bfloat16, which holds every level."""
    return values.to(torch.bfloat16) / 128


OF_LINEAR_LAYERS: Mapping[str, tuple[str, Callable[[torch.dtype], Probe]]] = {
    "dynamic-quant": ("npu_dynamic_quant", _dynamic),
    "quantize": ("npu_quantize", _static),
    "matmul-dynamic": ("npu_quant_matmul", partial(_product, static=False)),
    "matmul-static": ("npu_quant_matmul", partial(_product, static=True)),
}
"""Operators that every quantised linear layer calls, and their probes, which start-up runs, too."""

OTHERS: Mapping[str, tuple[str, Callable[[torch.dtype], Probe]]] = {
    "experts": ("npu_grouped_matmul", _experts_product),
    "swiglu-wide": ("npu_dequant_swiglu_quant", _wide_swiglu),
}
"""The product of experts, and a form that the plugin doesn't call yet."""


OF_INT4: Mapping[str, tuple[str, Callable[[torch.dtype], Probe]]] = {
    "groups": ("npu_weight_quant_batchmatmul", partial(_int4_product, groups=4)),
    "rows": ("npu_weight_quant_batchmatmul", partial(_int4_product, groups=1)),
    "experts": ("npu_grouped_matmul", partial(_int4_experts_product, groups=4)),
    "experts-rows": ("npu_grouped_matmul", partial(_int4_experts_product, groups=1)),
}
"""Operators of layers and of experts with int4 weights whose inputs are not rounded."""

OF_W4A8: Mapping[str, tuple[str, Callable[[torch.dtype], Probe]]] = {
    "w4a8": ("npu_quant_matmul", _w4a8_product),
    "w4a8-experts": ("npu_grouped_matmul", partial(_w4a8_experts_product, groups=2, inputs=512)),
    "w4a8-experts-rows": (
        "npu_grouped_matmul",
        partial(_w4a8_experts_product, groups=1, inputs=192),
    ),
}
"""Operators of layers and of experts with int4 weights and int8 inputs."""


def refuse_wrong(
    dtype: torch.dtype, put: Put, operators: Collection[str], w4a8: bool = False
) -> None:
    """Refuse to serve a quantised model where one of its operators rounds or multiplies wrongly.

    `w4a8` says whether some weights of four bits are beside int8 inputs.
    """
    known = [*OF_LINEAR_LAYERS.values(), *OF_INT4.values()]
    asked = [pair for pair in known if pair[0] in operators]
    for operator, probe_of in [*asked, *(OF_W4A8.values() if w4a8 else ())]:
        outcome = probe_of(dtype).run(f"{operator}, {dtype}", put)
        if outcome.verdict.is_bad:
            raise PrepError(
                f"this device computes {operator} wrongly ({dtype}): expected "
                f"{outcome.expected}, got {outcome.got}; serve weights of 16 bits, or see "
                "vllm-npu-prep verify-device"
            )


def _zeros(dtype: torch.dtype, context: RowContext) -> Outcome:
    """Check that products of rows of zeros, which padding may be, are zeros and not NaN."""
    values, scale = torch.ops.npu.npu_dynamic_quant(context.put(torch.zeros(3, 64, dtype=dtype)))
    weight = context.put(torch.ones(32, 64, dtype=torch.int8)).t()
    product = torch.ops.npu.npu_quant_matmul(
        values,
        weight,
        context.put(torch.full((32,), 0.5)),
        pertoken_scale=scale,
        output_dtype=dtype,
    )
    return compare(product, torch.zeros(3, 32, dtype=dtype), f"rows of zeros, {dtype}")


def _rows() -> Iterator[Row]:
    for short, dtype in DTYPES.items():
        for name, (operator, probe_of) in {**OF_LINEAR_LAYERS, **OTHERS}.items():
            yield row_of_probe(f"int8-{name}-{short}", operator, probe_of, dtype)
        for name, (operator, probe_of) in {**OF_INT4, **OF_W4A8}.items():
            yield row_of_probe(f"int4-{name}-{short}", operator, probe_of, dtype)
        yield Row(
            f"int8-zeros-{short}",
            "npu_dynamic_quant, npu_quant_matmul",
            partial(_zeros, dtype),
        )


ROWS: tuple[Row, ...] = tuple(_rows())
