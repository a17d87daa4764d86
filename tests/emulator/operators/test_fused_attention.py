"""Fused attention against its definition in float64, beyond the rows of `verify-device`."""

import pytest
import torch

from ascend_emulator import profiles
from ascend_emulator.operators import KernelRefusalError
from tests.emulator.operators import formula
from tests.emulator.operators.calls import (
    DECODES,
    MIXED,
    PROMPTS,
    V1,
    V2,
    V2_NAMES,
    Batch,
    call,
    fused,
    triangle,
)

DTYPES = [torch.float16, torch.bfloat16]
UNEVEN = [(3, 5), (0, 2), (20, 7)]
"""Every request with its own query length."""
NO_MASK = {"sparse_mode": 0, "atten_mask": None}
REFUSED = {
    ("test_larger_blocks", "docs"): "block size of TND",
    ("test_bands", "docs"): "inner_precise of TND",
    ("test_a_request_without_keys_needs_no_row", "docs"): "rows of the table",
}
"""What not every profile allows: the test, the profile, and the record that the call breaks."""


@pytest.fixture(autouse=True, params=list(profiles.PROFILES))
def profile(request):
    """Every test of this file runs in each profile."""
    broken = REFUSED.get((request.function.__name__, request.param))
    if broken:
        refusal = pytest.RaisesExc(KernelRefusalError, match=rf"\[{broken},")
        request.applymarker(pytest.mark.xfail(raises=refusal, strict=True, reason=broken))
    with profiles.using(request.param):
        yield request.param


def same(batch, arguments, visible=formula.causal, version=1):
    """Assert that a TND call equals the formula."""
    output, _ = fused(arguments, version)
    expected, _ = formula.of_batch(batch, visible)
    formula.assert_close(output, torch.cat(expected), batch.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "form", "version"), [(PROMPTS, 0, 1), (MIXED, 3, 2), (DECODES, 3, 1), (MIXED, 4, 2)]
)
def test_any_step(lengths, form, version, dtype, seed):
    """Over its own keys, or over a cache of rank 3 or 4; the latter goes to V3: no small heads."""
    batch = Batch(lengths, seed, dtype=dtype, head_size=64 if form == 4 else 16)
    same(batch, batch.paged(form) if form else batch.packed(), version=version)


@pytest.mark.parametrize("block_size", [16, 256, 512])
def test_larger_blocks(block_size, seed):
    """Also smaller ones for prompts: what FAI takes and the documentation does not."""
    batch = Batch(MIXED, seed, block_size=block_size)
    same(batch, batch.paged())


def test_a_request_without_keys_needs_no_row(seed):
    """As in graphs with more requests than the step's table."""
    arguments = Batch(DECODES, seed).paged(**NO_MASK)
    arguments["actual_seq_lengths_kv"][-1] = 0
    expected, _ = fused(arguments)
    output, _ = fused(arguments | {"block_table": arguments["block_table"][:-1]})
    assert torch.equal(output, expected) and expected[:-1].any()


@pytest.mark.parametrize("lengths", [PROMPTS, MIXED])
@pytest.mark.parametrize("size", [None, 1, 17])
def test_a_window_of_w_is_pre_tokens_w_minus_one(size, lengths, seed):
    """Without a mask everything is seen."""
    batch = Batch(lengths, seed, head_size=64)
    visible, changes = formula.everything, NO_MASK
    if size:
        visible = formula.window(size)
        changes = {"sparse_mode": 4, "pre_tokens": size - 1, "next_tokens": 0}
    same(batch, batch.packed(**changes), visible)
    same(batch, batch.paged(**changes), visible)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (3, 2), (5, -1), (-1, 3), (10**9, 10**9)])
def test_bands(before, after, seed):
    batch = Batch([(20, 5), (9, 9)], seed, head_size=64)
    changes = {"sparse_mode": 4, "pre_tokens": before, "next_tokens": after, "inner_precise": 2}
    same(batch, batch.paged(**changes), formula.band(before, after))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.bool, (2048, 2048)), (torch.int8, (1, 2048, 2048)), (torch.uint8, (1, 1, 2048, 2048))],
)
def test_dtypes_and_shapes_of_the_constant_mask(dtype, shape, seed):
    batch = Batch(MIXED, seed)
    same(batch, batch.paged(atten_mask=triangle(dtype).view(shape)))


ONES = torch.ones(2048, 2048, dtype=torch.int8)
WRONG = {
    "nothing masked": torch.zeros_like(ONES),
    "everything masked": ONES,
    "inverted": ONES.tril(),
    "diagonal masked": ONES.triu(),
    "one token ahead visible": ONES.triu(2),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("mode", [3, 4])
def test_a_wrong_constant_gives_wrong_results(name, mode, seed):
    batch = Batch(PROMPTS, seed, head_size=64)
    changes = {"sparse_mode": mode, "pre_tokens": 50, "next_tokens": 0}
    right, _ = fused(batch.packed(**changes))
    output, _ = fused(batch.packed(**changes, atten_mask=WRONG[name]))
    assert not torch.allclose(output, right, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@pytest.mark.parametrize(
    ("mode", "visible", "origin"),
    [
        (None, formula.everything, "lower right"),
        (2, formula.causal, "upper left"),
        (3, formula.causal, "lower right"),
        (4, formula.window(4), "lower right"),
    ],
)
def test_layouts_with_a_batch_axis(layout, mode, visible, origin, seed):
    """Without a mask and with the constant one. No layer of the plugin uses them."""
    batch = Batch(UNEVEN, seed)
    mask = {"atten_mask": triangle(), "sparse_mode": mode, "pre_tokens": 3, "next_tokens": 0}
    output, _ = fused(batch.padded(layout, **(mask if mode else {})))
    if layout == "BSH":
        output = output.unflatten(2, (batch.heads[0], -1))
    elif layout == "BNSD":
        output = output.transpose(1, 2)
    expected, _ = formula.of_batch(batch, visible, origin=origin)
    for rows, of_request in zip(expected, output, strict=True):
        formula.assert_close(of_request[: len(rows)], rows, batch.dtype)
        assert not of_request[len(rows) :].any()


def test_full_masks_may_differ_by_request(seed):
    batch = Batch([(3, 4), (3, 4)], seed)
    mask = torch.zeros(2, 1, 4, 7, dtype=torch.uint8)
    mask[0, ..., 2] = mask[1, ..., 5] = 1
    output, _ = fused(batch.padded("BSND", atten_mask=mask))
    for request, hidden in enumerate((2, 5)):
        expected, _ = formula.of_batch(batch, lambda _, column, hidden=hidden: column != hidden)
        formula.assert_close(output[request], expected[request], batch.dtype)


def test_softmax_lse(seed):
    batch = Batch(MIXED, seed)
    for version in (1, 2):
        _, lse = fused(batch.paged(softmax_lse_flag=True), version)
        expected = torch.cat(formula.of_batch(batch)[1])
        assert lse.dtype == torch.float32 and lse.shape == (103, 4, 1)
        formula.assert_close(lse[..., 0], expected, batch.dtype)
    assert fused(batch.paged())[1].shape == (0,), "nobody asked for it"
    batch = Batch(UNEVEN, seed)
    _, lse = fused(batch.padded("BNSD", softmax_lse_flag=True))
    assert lse.shape == (3, 4, 7, 1)
    for request, expected in enumerate(formula.of_batch(batch, formula.everything)[1]):
        formula.assert_close(lse[request, :, : len(expected), 0].T, expected, batch.dtype)


def test_requests_without_query_tokens(seed):
    batch = Batch([(5, 2), (7, 0), (0, 3)], seed)
    same(batch, batch.paged())
    same(batch, batch.packed())


@pytest.mark.parametrize("name", [V1, V2])
@pytest.mark.parametrize("with_workspace", [True, False])
def test_out_writes_what_the_functional_form_returns(name, with_workspace, seed):
    batch = Batch(MIXED, seed)
    arguments = batch.paged(softmax_lse_flag=True)
    if name == V2:
        arguments = {V2_NAMES.get(key, key): value for key, value in arguments.items()}
    expected = call(name, arguments)
    workspace = call(name.replace("::", "::_") + "_get_max_workspace", arguments)
    assert workspace.dim() == 1 and workspace.dtype == batch.dtype
    out = [torch.full_like(batch.query, float("nan")), torch.zeros(103, 4, 1)]
    extra = {"workspace": workspace} if with_workspace else {}
    result = call(name, {**arguments, **extra, "out": out}, "out")
    for given, returned, wanted in zip(out, result, expected):
        assert returned is given and torch.equal(given, wanted)


def test_out_leaves_the_second_output_alone_unless_asked(seed):
    batch = Batch(DECODES, seed)
    out = [torch.empty_like(batch.query), torch.full((1,), 7.0, dtype=batch.dtype)]
    call(V1, {**batch.paged(), "out": out}, "out")
    assert out[1].item() == 7.0


def test_long_prompts_are_cut_without_changing_the_result(seed, monkeypatch):
    batch = Batch(MIXED, seed)
    whole = fused(batch.paged())
    monkeypatch.setattr("ascend_emulator.operators.attention.MASKED_AT_ONCE", 1000)
    torch.testing.assert_close(fused(batch.paged())[0], whole[0])
