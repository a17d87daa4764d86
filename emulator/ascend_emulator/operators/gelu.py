"""References of GELU and of the activation that is gated by it."""

from functools import partial

import torch

from ascend_emulator.operators.constraint import Constraint, Enforced, Family, shape_of

GELU = "npu::npu_gelu"
GEGLU = "npu::npu_geglu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
APPROXIMATIONS = ("none", "tanh")

NAME = "gelu"
record = partial(Constraint, NAME)
AGREED, DOCSTRING, PRACTICE = Enforced.AGREED, Enforced.DOCSTRING, Enforced.PRACTICE
DOCUMENTATION = "Ascend/op-plugin, its page of `npu_gelu`; cann/ops-nn 9.1.0, `aclnnGeGluV3`"
NO_GELU = "; no docstring for npu_gelu"

# In each record: argument, name, demand, docstring_says, practice, source, enforced, why.
GELU_RULES = Family(
    NAME,
    [
        record(
            "input",
            "dtype",
            "float16, bfloat16 or float32",
            "these three" + NO_GELU,
            "the same",
            DOCUMENTATION,
            AGREED,
        ),
        record(
            "input",
            "rank",
            "rank 1 to 8",
            "any up to 8" + NO_GELU,
            "at least 1 (npu_geglu)",
            "torch_npu's Meta function",
            DOCSTRING,
        ),
        record(
            "approximate",
            "approximate",
            "'none' or 'tanh'; of npu_geglu 0 or 1",
            "0: none, 1: tanh" + NO_GELU,
            "the same",
            DOCUMENTATION,
            AGREED,
        ),
        record(
            "dim",
            "dim",
            "an existing dimension",
            "-rank to rank - 1",
            "the same",
            "torch_npu's Meta function",
            AGREED,
        ),
        record(
            "input",
            "even",
            "an even size along dim",
            "two halves along dim",
            "the same",
            "torch_npu's Meta function",
            AGREED,
        ),
        record(
            "activate_left",
            "activated half",
            "the first half if true, else the second",
            "not mentioned",
            "false, the default, activates the second half",
            "cann/ops-nn 9.1.0, `aclnnGeGluV3`",
            PRACTICE,
            "GeGLU layers of vLLM activate the first half",
            refused=False,
        ),
    ],
)


def gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    demand = GELU_RULES.call(GELU).demand
    demand("dtype", input.dtype in DTYPES, input.dtype)
    demand("rank", 1 <= input.dim() <= 8, shape_of(input))
    demand("approximate", approximate in APPROXIMATIONS, repr(approximate))
    return torch.nn.functional.gelu(input.float(), approximate=approximate).to(input.dtype)


def geglu(
    input: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one half times GELU of the other, and that GELU."""
    demand = GELU_RULES.call(GEGLU).demand
    demand("dtype", input.dtype in DTYPES, input.dtype)
    demand("rank", 1 <= input.dim() <= 8, shape_of(input))
    demand("approximate", approximate in (0, 1), approximate)
    demand("dim", -input.dim() <= dim < input.dim(), f"{dim} for rank {input.dim()}")
    demand("even", input.shape[dim] % 2 == 0, f"{shape_of(input)} along {dim}")
    left, right = input.float().chunk(2, dim)
    gate, up = (left, right) if activate_left else (right, left)
    activated = torch.nn.functional.gelu(gate, approximate=APPROXIMATIONS[approximate])
    return (activated * up).to(input.dtype), activated.to(input.dtype)
