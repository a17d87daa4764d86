"""References of the normalisation, activation and rotary operators."""

import torch

from ascend_emulator.operators.constraint import Call, shape_of

RMS_NORM = "npu::npu_rms_norm"
ADD_RMS_NORM = "npu::npu_add_rms_norm"
ADD_RMS_NORM_CAST = "npu::npu_add_rms_norm_cast"
GEMMA_RMS_NORM = "npu::npu_gemma_rms_norm"
SWIGLU = "npu::npu_swiglu"
ROTARY_MUL = "npu::npu_rotary_mul"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise over the dimensions of gamma; the second result is the reciprocal, float32."""
    _check_norm(Call("norms", RMS_NORM), input, gamma)
    return _normalise(input, gamma, epsilon)


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the norm of ``x1 + x2``, its reciprocal, and the sum."""
    return _add_and_normalise(Call("norms", ADD_RMS_NORM, {"input": "x1"}), x1, x2, gamma, epsilon)


def _add_and_normalise(
    call: Call, x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_norm(call, x1, gamma)
    ok = x1.shape == x2.shape and x1.dtype == x2.dtype
    call.demand("equal shapes", ok, f"{shape_of(x2)} {x2.dtype} for {shape_of(x1)} {x1.dtype}")
    total = (x1.float() + x2.float()).to(x1.dtype)
    normed, reciprocal = _normalise(total, gamma, epsilon)
    return normed, reciprocal, total


def add_rms_norm_cast(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the norm of ``x1 + x2`` as float32 and in `x1`'s dtype, its reciprocal, and the sum.

    Kernels round the sum before the norm in float16, and not in bfloat16. The record about the sum
    holds for both: the difference is not larger than what rounding the result makes.
    """
    call = Call("norms", ADD_RMS_NORM_CAST, {"input": "x1"})
    call.demand("16 bits", x1.dtype in DTYPES[:2], x1.dtype)
    normed, reciprocal, total = _add_and_normalise(call, x1, x2, gamma, epsilon)
    return normed.float(), normed, reciprocal, total


def gemma_rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a norm with factors of ``1 + gamma``, and its reciprocal."""
    _check_norm(Call("norms", GEMMA_RMS_NORM), input, gamma)
    return _normalise(input, gamma.float() + 1, epsilon)


def _check_norm(call: Call, x: torch.Tensor, gamma: torch.Tensor) -> None:
    call.demand("dtype", x.dtype in DTYPES, x.dtype)
    call.demand("rank", 2 <= x.dim() <= 8, shape_of(x))
    call.demand("same dtype", gamma.dtype == x.dtype, gamma.dtype)
    ok = 0 < gamma.dim() < x.dim() and x.shape[-gamma.dim() :] == gamma.shape
    call.demand("gamma shape", ok, f"{shape_of(gamma)} for {shape_of(x)}")


def _normalise(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    normed_dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    mean = x.float().square().mean(normed_dims, keepdim=True)
    reciprocal = (mean + epsilon).rsqrt()
    return (x.float() * reciprocal * gamma.float()).to(x.dtype), reciprocal


def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Compute ``silu(a) * b`` of the two halves along `dim`."""
    demand = Call("npu_swiglu", SWIGLU).demand
    demand("dtype", input.dtype in DTYPES, input.dtype)
    demand("rank", 1 <= input.dim() <= 8, shape_of(input))
    demand("dim", -input.dim() <= dim < input.dim(), f"{dim} for rank {input.dim()}")
    demand("even", input.shape[dim] % 2 == 0, f"{shape_of(input)} along {dim}")
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``r1 * input + r2 * rotated``; `rotary_mode` or the matrix `rotate` rotates."""
    _check_rotary(Call("npu_rotary_mul", ROTARY_MUL), input, r1, r2, rotary_mode, rotate)
    x = input.float()
    if rotate is not None:
        rotated = x @ rotate.float()
    elif rotary_mode == "half":
        first, second = x.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    else:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (r1.float() * x + r2.float() * rotated).to(input.dtype)


def _check_rotary(
    call: Call,
    x: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str,
    rotate: torch.Tensor | None,
) -> None:
    demand = call.demand
    demand("dtype", x.dtype in DTYPES, x.dtype)
    for argument, tensor in {"input": x, "r1": r1, "r2": r2}.items():
        demand("rank", tensor.dim() == 4, shape_of(tensor), argument)
    for argument, factor in {"r1": r1, "r2": r2, "rotate": rotate}.items():
        if factor is not None:
            demand("same dtype", factor.dtype == x.dtype, factor.dtype, argument)
    demand("rotary_mode", rotary_mode in ("half", "interleave"), repr(rotary_mode))
    head_size = x.shape[3]
    demand("head size", head_size % 2 == 0 and head_size < 896, head_size)
    demand("equal shapes", r1.shape == r2.shape, f"{shape_of(r2)} for r1 {shape_of(r1)}")
    batch_and_heads = _layouts(x, r1, rotary_mode)
    demand("r1 layout", batch_and_heads, f"{shape_of(r1)} for input {shape_of(x)}")
    limit = (
        (lambda b, n: b * n < 1000)
        if rotary_mode == "interleave"
        else (lambda b, n: b < 1000 and n < 1000)
    )
    demand("batch and heads", any(limit(b, n) for b, n in batch_and_heads), shape_of(x))
    if rotate is not None:
        ok = shape_of(rotate) == (head_size, head_size)
        demand("rotate", ok, f"{shape_of(rotate)} for D {head_size}")


def _layouts(x: torch.Tensor, r1: torch.Tensor, rotary_mode: str) -> list[tuple[int, int]]:
    """Return B and N under each layout in which `r1` is one of those that the mode takes."""
    found = []
    # Positions of B, N and S in BNSD, BSND and SBND.
    for batch, heads, sequence in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        size = {"b": x.shape[batch], "n": x.shape[heads]}
        given = r1.shape[batch], r1.shape[heads]
        forms = [(1, 1)]
        if rotary_mode == "half":
            forms += [(size["b"], 1), (size["b"], size["n"])]
        if r1.shape[sequence] == x.shape[sequence] and r1.shape[3] == x.shape[3] and given in forms:
            found.append((size["b"], size["n"]))
    return found
