"""Each fused operator once, on a few numbers, held against a formula in float64.

Rows of ``verify-device`` and the start-up of an engine make the same calls. A wrong kernel gives
wrong answers without an error, so an engine doesn't use an operator that differs.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from vllm_npu_prep.config import FUSED_OPERATORS
from vllm_npu_prep.verify import experts, formulas, int8
from vllm_npu_prep.verify.outcome import first_line_of
from vllm_npu_prep.verify.row import (
    DTYPES,
    Probe,
    Put,
    Results,
    Row,
    row_of_probe,
    uniform,
)

EPSILON = 0.3
"""A large epsilon, so that a norm that leaves it out differs."""


def probes(dtype: torch.dtype) -> Mapping[str, Probe]:
    x, y = uniform(5, 128, dtype=dtype), uniform(5, 128, dtype=dtype, seed=1)
    weight = uniform(128, dtype=dtype, seed=2)
    npu = torch.ops.npu
    return {
        "rms_norm": Probe(
            lambda put: (
                npu.npu_rms_norm(put(x), put(weight), EPSILON)[0],
                npu.npu_rms_norm(_heads(put(x)), put(weight)[:32], EPSILON)[0],
            ),
            lambda: (
                formulas.rms_norm(x, weight, EPSILON),
                formulas.rms_norm(_heads(x), weight[:32], EPSILON),
            ),
        ),
        "add_rms_norm": Probe(
            lambda put: npu.npu_add_rms_norm(put(x), put(y), put(weight), EPSILON)[::2],
            lambda: (
                formulas.rms_norm(x.double() + y.double(), weight, EPSILON),
                x.double() + y.double(),
            ),
        ),
        "add_rms_norm_cast": Probe(
            lambda put: _casting_norm(put(x), put(y), put(weight)),
            lambda: (
                formulas.rms_norm(x.double() + y.double(), weight, EPSILON),
                torch.zeros(5, 128, dtype=torch.float64),
                x.double() + y.double(),
            ),
        ),
        "gemma_rms_norm": Probe(
            lambda put: npu.npu_gemma_rms_norm(put(x), put(weight), EPSILON)[:1],
            lambda: (formulas.rms_norm(x, 1 + weight.double(), EPSILON),),
        ),
        "rotary": _rotary(dtype),
        "mrope": _mrope(dtype),
        "vision_attention": _vision_attention(dtype),
        "vision_rotary": _vision_rotary(dtype),
        "qkv": _projection(dtype),
        "swiglu": Probe(
            lambda put: (npu.npu_swiglu(put(x), -1),),
            lambda: (formulas.swiglu(x),),
        ),
        "geglu": Probe(
            lambda put: npu.npu_geglu(put(x), -1, 0, activate_left=True)[:1],
            lambda: (_gelu(x[:, :64].double()) * x[:, 64:].double(),),
        ),
        "gelu": Probe(
            lambda put: (npu.npu_gelu(put(x), approximate="none"),),
            lambda: (_gelu(x.double()),),
        ),
        "latent": _products(dtype),
        "experts": experts.experts(dtype),
        "finalize_routing": experts.finalize_routing(dtype),
        "gating": experts.gating(dtype),
        "gating_softmax": experts.gating_softmax(dtype),
        "top_k_top_p": _limits(),
        "int8_norm": int8.norm(dtype),
        "int8_swiglu": int8.swiglu(dtype),
    }


def is_right(name: str, dtype: torch.dtype, put: Put, log: Callable[[str], object]) -> bool:
    """Return whether an operator gives what its formula says; if not, log why it is off."""
    return stays_on(f"fused operator {name}", probes(dtype)[name], put, log)


def stays_on(name: str, probe: Probe, put: Put, log: Callable[[str], object]) -> bool:
    """Return whether an operator gives what its formula says; if not, log that it is off.

    An operator that raises an error is wrong, too. The caller then uses torch's own operators.
    """
    try:
        outcome = probe.run(name, put)
    except Exception as error:
        log(f"{name} is switched off: it fails on this device ({first_line_of(error)})")
        return False
    if outcome.verdict.is_bad:
        log(
            f"{name} is switched off: this device computes it wrongly (expected "
            f"{outcome.expected}, got {outcome.got})"
        )
    return not outcome.verdict.is_bad


def _casting_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> Results:
    """Return the norm, how far its copy in float32 is from it, and the sum."""
    wide, normed, _, total = torch.ops.npu.npu_add_rms_norm_cast(x, y, weight, EPSILON)
    return normed, wide - normed.float(), total


def _heads(x: torch.Tensor) -> torch.Tensor:
    """Return heads of a slice of a projection ``[5, 128]``, as norms of q and k get them."""
    return x[:, 32:96].view(5, 2, 32)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x / 2 * (1 + torch.erf(x / 2**0.5))


def _angles(rows: int, frequencies: int) -> torch.Tensor:
    position, index = torch.arange(rows).double(), torch.arange(frequencies).double()
    return position[:, None] / 50 ** (index / frequencies)


def _cos_sin(angles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def _rotary(dtype: torch.dtype) -> Probe:
    """Probe slices of a projection with half of each head rotated, pairs in both forms."""
    projected = uniform(5, 512, dtype=dtype)
    positions, table = torch.tensor([3, 0, 7, 5, 3]), _cos_sin(_angles(8, 16), dtype)

    def call(put: Put) -> Results:
        query, key, _ = put(projected).split([256, 128, 128], -1)
        return tuple(
            part
            for mode in ("half", "interleave")
            for part in torch.ops.npu.npu_mrope(
                put(positions),
                query,
                key,
                put(table),
                64,
                mrope_section=[0, 0, 0],
                rotary_mode=mode,
            )
        )

    def expected() -> Results:
        heads = projected.view(5, 8, 64)
        return tuple(
            formulas.rotated(heads[:, part], table[positions], interleaved).flatten(1)
            for interleaved in (False, True)
            for part in (slice(0, 4), slice(4, 6))
        )

    return Probe(call, expected)


def _mrope(dtype: torch.dtype) -> Probe:
    """Probe positions of an image, by sections of time, height and width."""
    query, key = uniform(3, 256, dtype=dtype), uniform(3, 128, dtype=dtype, seed=1)
    positions = torch.tensor([[1, 1, 4], [1, 2, 4], [1, 3, 4]])
    table, sections = _cos_sin(_angles(8, 64), dtype), [16, 24, 24]

    def call(put: Put) -> Results:
        return torch.ops.npu.npu_mrope(
            put(positions), put(query), put(key), put(table), 128, mrope_section=sections
        )

    def expected() -> Results:
        section = torch.repeat_interleave(torch.arange(3), torch.tensor(sections)).repeat(2)
        rows = table[positions[section].T, torch.arange(128)]
        heads = query.view(3, 2, 128), key[:, None]
        return tuple(formulas.rotated(each, rows, False).flatten(1) for each in heads)

    return Probe(call, expected)


def _vision_attention(dtype: torch.dtype) -> Probe:
    """Probe two images of three and two tokens, with heads of 80."""
    query, key, value = (
        uniform(5, 160, dtype=dtype, seed=seed).view(5, 2, 80) for seed in range(3)
    )
    ends, scale = [3, 5], 80**-0.5

    def call(put: Put) -> Results:
        attended = torch.ops.npu.npu_fusion_attention(
            *map(put, (query, key, value)),
            2,
            "TND",
            scale=scale,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
        )
        return (attended[0],)

    def expected() -> Results:
        parts = []
        for start, end in ((0, 3), (3, 5)):
            seen = formulas.visible(end - start, end - start, causal=False)
            rows = slice(start, end)
            parts.append(formulas.attention(query[rows], key[rows], value[rows], scale, seen)[0])
        return (torch.cat(parts),)

    return Probe(call, expected)


def _vision_rotary(dtype: torch.dtype) -> Probe:
    x, angles = uniform(5, 240, dtype=dtype).view(1, 5, 3, 80), _angles(5, 40)
    factors = [torch.cat((f, f), -1)[None, :, None].to(dtype) for f in (angles.cos(), angles.sin())]

    def call(put: Put) -> Results:
        return (torch.ops.npu.npu_rotary_mul(put(x), *map(put, factors), "half"),)

    return Probe(call, lambda: (formulas.rotated(x[0], _cos_sin(angles, dtype), False)[None],))


def _projection(dtype: torch.dtype) -> Probe:
    """Probe three transposed weights of different widths, with biases."""
    x, weight = uniform(5, 64, dtype=dtype) / 4, uniform(64, 64, dtype=dtype, seed=1) / 4
    bias = uniform(64, dtype=torch.float16 if dtype == torch.float16 else torch.float32, seed=2)
    sizes = [32, 16, 16]

    def call(put: Put) -> Results:
        weights = [part.t() for part in put(weight).split(sizes)]
        biases = list(put(bias).split(sizes))
        inputs = [put(x)] * len(sizes)
        return tuple(
            torch.ops.npu.npu_grouped_matmul(
                inputs, weights, bias=biases, split_item=0, group_type=-1
            )
        )

    def expected() -> Results:
        return (x.double() @ weight.double().T + bias.double()).split(sizes, -1)

    return Probe(call, expected)


def _products(dtype: torch.dtype) -> Probe:
    """Probe rows of heads with gaps between them, each head times its weights."""
    rows = uniform(5, 4 * 48, dtype=dtype).view(5, 4, 48)[..., :32]
    weights = uniform(4 * 32, 16, dtype=dtype, seed=1).view(4, 32, 16)

    def call(put: Put) -> Results:
        perm = [1, 0, 2]
        return (
            torch.ops.npu.npu_transpose_batchmatmul(
                put(rows), put(weights), perm_x1=perm, perm_x2=[0, 1, 2], perm_y=perm
            ),
        )

    def expected() -> Results:
        return (torch.einsum("tnk,nkl->tnl", rows.double(), weights.double()),)

    return Probe(call, expected)


def _limits() -> Probe:
    """Probe probabilities 0.4, 0.3, 0.2, 0.1 and small ones, and a row whose best four are equal.

    Logits are float32 whatever the model's dtype.
    """
    mixed = [0.3, 0.01, 0.1, 0.4, 0.02, 0.2]
    logits = torch.tensor([mixed, mixed, mixed, [0.2, 0.1, 0.2, 0.2, 0.1, 0.2]]).log()
    k = torch.tensor([4, 2, 6, 2], dtype=torch.int32)
    p = torch.tensor([0.65, 1.0, 0.95, 1.0])
    best_two, best_four, every = [1, 0, 0, 1, 0, 0], [1, 0, 1, 1, 0, 1], [1] * 6
    kept = (
        [best_two, best_two, best_four, best_four],  # by both
        [best_four, best_two, every, best_four],  # by k
        [best_two, every, best_four, every],  # by p
    )

    def call(put: Put) -> Results:
        limit = torch.ops.npu.npu_top_k_top_p
        return (
            limit(put(logits), put(p), put(k)),
            limit(put(logits), None, put(k)),
            limit(put(logits), put(p), None),
        )

    def expected() -> Results:
        removed = [torch.tensor(each) == 0 for each in kept]
        return tuple(logits.double().masked_fill(each, float("-inf")) for each in removed)

    return Probe(call, expected)


def _probe_of(name: str, dtype: torch.dtype) -> Probe:
    return probes(dtype)[name]


ROWS: tuple[Row, ...] = (
    *(
        row_of_probe(
            f"fused-{name.replace('_', '-')}-{short}",
            operator,
            partial(_probe_of, name),
            dtype,
        )
        for name, operator in FUSED_OPERATORS.items()
        for short, dtype in DTYPES.items()
    ),
    *(
        row_of_probe(
            f"fused-experts-adapters-{short}",
            "npu_moe_init_routing_v2, npu_grouped_matmul",
            experts.expert_adapters,
            dtype,
        )
        for short, dtype in DTYPES.items()
    ),
)
