"""References of GELU and of the activation that is gated by it."""

import torch

from ascend_emulator.operators.constraint import Call, shape_of

GELU = "npu::npu_gelu"
GEGLU = "npu::npu_geglu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
APPROXIMATIONS = ("none", "tanh")


def gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    demand = Call("gelu", GELU).demand
    demand("dtype", input.dtype in DTYPES, input.dtype)
    demand("rank", 1 <= input.dim() <= 8, shape_of(input))
    demand("approximate", approximate in APPROXIMATIONS, repr(approximate))
    return torch.nn.functional.gelu(input.float(), approximate=approximate).to(input.dtype)


def geglu(
    input: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one half times GELU of the other, and that GELU."""
    demand = Call("gelu", GEGLU).demand
    demand("dtype", input.dtype in DTYPES, input.dtype)
    demand("rank", 1 <= input.dim() <= 8, shape_of(input))
    demand("approximate", approximate in (0, 1), approximate)
    demand("dim", -input.dim() <= dim < input.dim(), f"{dim} for rank {input.dim()}")
    demand("even", input.shape[dim] % 2 == 0, f"{shape_of(input)} along {dim}")
    left, right = input.float().chunk(2, dim)
    gate, up = (left, right) if activate_left else (right, left)
    activated = torch.nn.functional.gelu(gate, approximate=APPROXIMATIONS[approximate])
    return (activated * up).to(input.dtype), activated.to(input.dtype)
