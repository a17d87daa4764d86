"""Which kernel a call of fused attention reaches by release, what it takes, and what it leaves."""

import math

import pytest
import torch

from ascend_emulator import profiles
from ascend_emulator.errors import EmulatorError
from ascend_emulator.operators import KernelRefusalError
from tests.emulator.operators import formula
from tests.emulator.operators.calls import Batch, fused, strided
from tests.emulator.operators.routes import explain
from tests.emulator.operators.violations.attention import BY_KERNEL
from tests.emulator.operators.violations.breaking import in_profile

BF16, FP16 = torch.bfloat16, torch.float16
NO_MASK = {"sparse_mode": 0, "atten_mask": None}

ROUTES = [
    # form, heads, head size, block size, changes, kernel on 8.5, kernel on 9.1
    ("prompt", (8, 2), 64, 0, {}, "FAI", "FAI"),
    ("prompt", (8, 2), 512, 0, {}, "IFA", "V3"),
    ("prompt", (8, 2), 128, 0, {"inner_precise": 1}, "V3", "V3"),
    ("prompt", (8, 2), 96, 0, {"inner_precise": 2}, "PFA", "V3"),
    ("prompt", (8, 8), 64, 0, {}, "V3", "FAI"),
    ("prompt", (8, 8), 96, 0, {}, "PFA", "FAI"),
    ("prompt", (8, 8), 128, 0, {"inner_precise": 1}, "V3", "V3"),
    ("prompt", (8, 8), 128, 0, {"inner_precise": 1, "dtype": FP16}, "V3", "FAI"),
    ("encoder", (8, 2), 64, 0, {}, "FAI", "FAI"),
    ("encoder", (8, 8), 64, 0, {}, "V3", "FAI"),
    ("encoder", (8, 8), 64, 0, {"inner_precise": 1, "dtype": FP16}, "FAI", "FAI"),
    ("encoder", (8, 8), 96, 0, {"dtype": FP16}, "PFA", "FAI"),
    ("window", (8, 2), 64, 0, {}, "V3", "FAI"),
    ("window", (8, 2), 192, 0, {}, "PFA", "FAI"),
    ("decode", (8, 2), 128, 128, {}, "FAI", "FAI"),
    ("decode", (8, 2), 128, 16, {}, "V3", "FAI"),
    ("decode", (8, 2), 96, 640, {}, "PFA", "V3"),
    ("decode", (8, 2), 128, 1024, {}, "V3", "V3"),
    ("decode", (8, 8), 128, 128, {}, "V3", "FAI"),
    ("chunk", (8, 2), 128, 128, {}, "FAI", "FAI"),
    ("chunk", (8, 2), 128, 128, {"cache_rank": 4}, "V3", "V3"),
    ("chunk", (8, 2), 192, 128, {"cache_rank": 4}, "PFA", "V3"),
    ("chunk", (8, 2), 128, 256, {}, "V3", "FAI"),
    ("paged window", (8, 2), 128, 128, {}, "V3", "FAI"),
]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("form", "heads", "size", "block", "changes", "on_85", "on_91"), ROUTES)
def test_a_call_reaches_the_kernel_of_its_release(
    form, heads, size, block, changes, on_85, on_91, version
):
    call = {
        "form": form,
        "dtype": BF16,
        "heads": heads[0],
        "kv_heads": heads[1],
        "head_size": size,
        "block_size": block,
        "version": version,
    } | changes
    assert explain("8.5", **call).kernel == on_85
    assert explain("9.1", **call).kernel == explain("docs", **call).kernel == on_91


TAKEN = [
    pytest.param(profile, taken, id=f"{name}-{number}")
    for (_, profile), rows in BY_KERNEL.items()
    for number, (name, _, taken) in enumerate(rows)
]


@pytest.mark.parametrize(("profile", "taken"), TAKEN)
def test_the_neighbour_of_a_refused_call_is_taken(profile, taken):
    output, _ = in_profile(profile, taken)()
    assert output.isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        *("contiguous query", "sum of blocks", "rows of the table"),
        *("keys for every query of mode 3", "block size of TND"),
    ],
)
def test_kernels_take_what_the_documents_alone_refuse(name):
    for demand, refused, _ in BY_KERNEL["documentation", "docs"]:
        if demand == name:
            output, _ = in_profile("9.1", refused)()
            assert output.isfinite().all()


@pytest.mark.parametrize(
    ("profile", "heads", "count", "broken"),
    [
        ("9.1", (2, 1), 4097, None),
        ("8.5", (2, 1), 4097, None),
        ("8.5", (2, 2), 4096, None),
        ("8.5", (2, 2), 4097, "lengths in PFA"),
        ("docs", (2, 1), 4096, None),
        ("docs", (2, 1), 4097, "number of lengths"),
        ("9.1", (2, 1), 65536, None),
        ("9.1", (2, 1), 65537, "requests"),
    ],
)
def test_how_many_lengths_a_call_may_have(profile, heads, count, broken):
    call = {"form": "prompt", "dtype": BF16, "heads": heads[0], "kv_heads": heads[1]}
    lengths = {"query_lens": [1] * count, "kv_lens": [1] * count, "version": 2}
    verdict = explain(profile, **call, head_size=192, **lengths)
    assert (verdict.constraint and verdict.constraint[1]) == broken


@pytest.mark.parametrize(
    ("profile", "first", "fewer", "sizes", "changes"),
    [
        pytest.param("9.1", 1, 0, {}, NO_MASK, id="undefined"),
        pytest.param("9.1", 1, 1, {}, NO_MASK, id="a batch below the number of cores"),
        pytest.param("9.1", 1, 0, {"block_size": 64}, NO_MASK, id="another block size"),
        pytest.param("8.5", 1, 0, {}, NO_MASK, id="CANN 8.5"),
        pytest.param("9.1", 2, 0, {}, NO_MASK, id="a query of two tokens"),
    ],
)
def test_rows_without_keys(profile, first, fewer, sizes, changes, request):
    """The decode kernel leaves them as they are; any other call defines them."""
    count = profiles.cube_cores() - fewer
    batch = Batch([(130, first)] + [(130, 1)] * (count - 1), heads=(4, 2), **sizes)
    arguments = batch.paged(**changes)
    arguments["actual_seq_lengths_kv"] = [*batch.kv_lens[:-2], 0, 0]
    with profiles.using(profile):
        output, lse = fused(arguments)
    if request.node.callspec.id == "undefined":
        assert output[-2:].isnan().all()
        expected, _ = formula.of_batch(batch)
        formula.assert_close(output[:-2], torch.cat(expected)[:-2], batch.dtype)
    else:
        assert (output[-2:] == 0).all() and (lse[-2:] == math.inf).all()


@pytest.mark.parametrize("form", ["packed", "paged"])
def test_strided_keys_are_copied_before_cann_9_1(form):
    arguments = getattr(Batch([(0, 5), (0, 9)], dtype=BF16), form)()
    expected, _ = fused(arguments)
    arguments |= {name: strided(arguments[name]) for name in ("key", "value")}
    with profiles.using("8.5"):
        output, _ = fused(arguments)
    assert torch.equal(output, expected)
    with profiles.using("9.1"), pytest.raises(KernelRefusalError, match="argument key: "):
        fused(arguments)


def test_a_profile_is_found_by_name_or_refused_with_the_list():
    assert profiles.current().name == profiles.DEFAULT == "9.1"
    with profiles.using("8.5") as profile:
        assert profile is profiles.current() and profile.cann == "8.5.0"
    assert profiles.current().name == "9.1"
    with pytest.raises(EmulatorError, match=r"'9' is not a profile; use one of 9\.1, 8\.5, docs"):
        profiles.find("9")
