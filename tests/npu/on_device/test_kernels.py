"""Drafting and verification on the device: the CPU's results, nothing waited for or read back."""

import pytest
import torch

import ascend_emulator
from ascend_emulator.operators import REFERENCES
from ascend_emulator.operators.schemas import schema_text
from tests.helpers.kernels import (
    Drafts,
    expanded_inputs,
    next_draft_step,
    padded_inputs,
    padded_next_tokens,
)
from vllm_npu_prep.ops import register_overrides


@pytest.fixture(autouse=True, scope="module")
def overrides():
    register_overrides("replace")


DRAFTS, EQUAL = [3, 0, 1, 4, 2], [3, 3, 3]
LAUNCHES = {
    "a draft step": (13, lambda seed: next_draft_step(9, 3, 16, 90, False, seed)),
    "a draft step in place": (12, lambda seed: next_draft_step(9, 0, 16, 90, True, seed)),
    "padded inputs": (7, lambda seed: padded_inputs(DRAFTS, seed)),
    "padded next tokens": (9, lambda seed: padded_next_tokens(9, 4, seed)),
    "expanded inputs": (22, lambda seed: expanded_inputs([4, 1, 9], 1, False, seed)),
    "shifted inputs": (29, lambda seed: expanded_inputs([4, 1, 9], 3, True, seed)),
    "greedy": (7, lambda seed: Drafts(EQUAL, seed).greedy(False)),
    "greedy among others": (8, lambda seed: Drafts(EQUAL, seed).greedy(True)),
    "greedy, other lengths": (14, lambda seed: Drafts(DRAFTS, seed).greedy(False)),
    "greedy without drafts": (3, lambda seed: Drafts([0, 0], seed).greedy(False)),
    "random": (18, lambda seed: Drafts(EQUAL, seed).random(True)),
    "random, other lengths": (25, lambda seed: Drafts(DRAFTS, seed).random(True)),
    "random without probabilities": (15, lambda seed: Drafts(EQUAL, seed).random(False)),
    "recovered": (8, lambda seed: Drafts(DRAFTS, seed).recover(True)),
    "recovered without probabilities": (9, lambda seed: Drafts(DRAFTS, seed).recover(False)),
    "expanded values": (6, lambda seed: Drafts(DRAFTS, seed).expand()),
}
"""How many launches a kernel may take, and its arguments."""

HIDDEN_COPIES = {"a draft step": 1, "a draft step in place": 1, "padded next tokens": 3}
"""Strided tensors that its operators copy first, if there are any."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_is_the_cpus_and_reads_nothing_back(name, seed):
    most_launches, make = LAUNCHES[name]
    for each in range(seed, seed + 3):
        launch = make(each)
        moved = launch.to("npu")
        torch.npu.synchronize()
        with ascend_emulator.count() as counts:
            moved.launch()
        for written, values in launch.run().items():
            assert torch.equal(moved.arguments[written].cpu(), values), written
        assert 0 < counts.launches <= most_launches, counts.nonzero()
        assert counts.hidden_copies <= HIDDEN_COPIES.get(name, 0), counts.nonzero()
        counted = set(counts.nonzero()) - {"hidden_copies"}
        assert counted == {"launches", "peak_memory_bytes"}, counts.nonzero()


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda r: f"{r.name}.{r.overload}")
def test_recorded_schemas_are_those_of_torch_npu(reference):
    real = [str(schema) for schema in torch._C._jit_get_schemas_for_operator(reference.name)]
    assert schema_text(reference.name, reference.overload) in real


PRODUCTS = {
    "linear": (torch.nn.functional.linear, (64, 48), (32, 48)),
    "mm": (torch.mm, (64, 48), (48, 32)),
    "addmm": (torch.addmm, (32,), (64, 48), (48, 32)),
    "bmm": (torch.bmm, (3, 64, 48), (3, 48, 32)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_halves_are_rounded_once(name, dtype, seed):
    """Whatever the CPU multiplies by: one element is off by half a step of its dtype at most."""
    draw = torch.Generator().manual_seed(seed)
    product, *shapes = PRODUCTS[name]
    given = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    got = product(*[each.npu() for each in given]).cpu()
    exact = product(*[each.double() for each in given])
    assert got.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=step / 2, atol=1e-5)
