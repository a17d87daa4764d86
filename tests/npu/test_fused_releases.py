"""Each combination of heads, blocks and release: served with the right result, or refused by name.

The plugin's table (`vllm_npu_prep.attention.fused_releases`) and the emulated card's
(`ascend_emulator.operators.fused_route`) were written apart, and both are compared here with a
third: the head sizes and block sizes that are expected to be served, in this file.
"""

import functools
import itertools

import pytest
import torch

from tests.emulator.operators.routes import Verdict, explain
from vllm_npu_prep.attention.families import FIA
from vllm_npu_prep.attention.fused_releases import (
    Form,
    FusedCall,
    FusedRules,
    Kernel,
    release_of,
)

FORMS = {
    Form.PROMPT: "prompt",
    Form.CHUNK: "chunk",
    Form.DECODE: "decode",
    Form.WINDOW: "window",
    Form.PAGED_WINDOW: "paged window",
}
RULES = {
    "9.1": FusedRules(release_of("9.1.0")),
    "8.5": FusedRules(release_of("8.5.0")),
    "docs": FusedRules(release_of("9.1.0"), documented=True),
}
HEADS = {"equal": (4, 4), "one query head": (1, 1), "grouped": (8, 2), "one for all": (8, 1)}
DTYPES = (torch.float16, torch.bfloat16)
HEAD_SIZES = (64, 80, 96, 128, 192, 256, 512)
BLOCK_SIZES = (16, 32, 48, 64, 128, 256, 384, 512, 768, 1024)
UP_TO_512 = tuple(size for size in BLOCK_SIZES if size <= 512)
STEPS_OF_128 = tuple(size for size in BLOCK_SIZES if size % 128 == 0)
FULL = (Form.PROMPT, Form.CHUNK, Form.DECODE)
WINDOWS = (Form.WINDOW, Form.PAGED_WINDOW)

# Block sizes with which an engine is served: by profile, whether several query heads share K and V,
# whether its layers have windows, and head size. What is not here is refused.
OF_91 = {
    **dict.fromkeys((64, 128), BLOCK_SIZES),
    **dict.fromkeys((80, 96, 192, 256), UP_TO_512),
}
SERVED = {
    ("9.1", False, False): OF_91,
    ("9.1", False, True): OF_91,
    ("9.1", True, False): OF_91,
    ("9.1", True, True): OF_91,
    ("8.5", True, False): OF_91,
    ("8.5", True, True): dict.fromkeys((64, 128), BLOCK_SIZES),
    # 192 in bfloat16 alone
    ("8.5", False, False): {**dict.fromkeys((64, 128), BLOCK_SIZES), 192: STEPS_OF_128},
    ("8.5", False, True): dict.fromkeys((64, 128), BLOCK_SIZES),
    **{
        ("docs", grouped, window): dict.fromkeys((64, 80, 96, 128, 192, 256), (128,))
        for grouped in (False, True)
        for window in (False, True)
    },
}


def is_served(
    profile: str,
    heads: str,
    dtype: torch.dtype,
    head_size: int,
    block_size: int,
    has_window: bool,
) -> bool:
    """Whether the expected table serves a combination; `heads` is a name of `HEADS`."""
    num_heads, num_kv_heads = HEADS[heads]
    is_grouped = num_heads != num_kv_heads
    of_sizes = SERVED[profile, is_grouped, has_window]
    if head_size == 192 and profile == "8.5" and not is_grouped and dtype != torch.bfloat16:
        return False
    return block_size in of_sizes.get(head_size, ())


@functools.cache
def on_the_card(profile: str, call: FusedCall) -> Verdict:
    """What the emulated card makes of a call, of one query token each, too, if it has a window."""
    settings = {
        "form": FORMS[call.form],
        "dtype": getattr(torch, call.dtype.removeprefix("torch.")),
        "heads": call.num_heads,
        "kv_heads": call.num_kv_heads,
        "head_size": call.head_size,
        "block_size": call.block_size,
    }
    verdict = explain(profile, **settings)
    if verdict.accepted and call.form is Form.PAGED_WINDOW:
        verdict = explain(profile, **settings, query_lens=[1, 1])
    return verdict


@pytest.mark.parametrize("profile", RULES)
@pytest.mark.parametrize("heads", HEADS)
def test_both_tables_agree_with_the_expected_one(profile, heads):
    num_heads, num_kv_heads = HEADS[heads]
    rules, wrong = RULES[profile], []
    product = itertools.product((FULL, WINDOWS), DTYPES, HEAD_SIZES, BLOCK_SIZES)
    for forms, dtype, head_size, block_size in product:
        expected = is_served(profile, heads, dtype, head_size, block_size, forms is WINDOWS)
        ours, emulated = True, True
        for form in forms:
            sizes = num_heads, num_kv_heads, head_size, block_size if form.is_paged else 0
            call = FusedCall(form, str(dtype), *sizes)
            verdict, refusal = on_the_card(profile, call), rules.refusal(call)
            ours, emulated = ours and refusal is None, emulated and verdict.accepted
            if refusal is None and verdict.kernel != rules.release.kernel_of(call):
                wrong.append((call, "kernel", verdict.kernel))
        if not ours == emulated == expected:
            wrong.append((forms[0], dtype, head_size, block_size, ours, emulated, expected))
    assert wrong == []


@pytest.mark.parametrize("profile", RULES)
def test_batches_are_limited_where_the_card_limits_them(profile):
    """Requests that share a prefix: 3 of 5 blocks each, in a cache of 8."""
    for head_size, num_kv_heads in itertools.product((64, 128, 192), (1, 4)):
        sizes = {"dtype": torch.bfloat16, "heads": 4, "kv_heads": num_kv_heads}
        sizes |= {"head_size": head_size, "block_size": 128}
        call = FusedCall(Form.CHUNK, "torch.bfloat16", 4, num_kv_heads, head_size, 128)
        shared = {"query_lens": [1] * 3, "kv_lens": [600] * 3, "num_blocks": 8}
        verdict = explain(profile, form="chunk", **sizes, **shared)
        assert verdict.accepted != RULES[profile].limits_batches([call]), (head_size, num_kv_heads)
        many = {"query_lens": [1] * 4097, "kv_lens": [1] * 4097}
        verdict = explain(profile, form="chunk", **sizes, **many)
        assert verdict.accepted != RULES[profile].limits_batches([call])


def test_a_release_before_8_5_has_one_kernel():
    rules = FusedRules(release_of("8.3.RC1"))
    call = FusedCall(Form.DECODE, "torch.bfloat16", 8, 2, 128, 128)
    assert rules.release.kernel_of(call) is Kernel.PFA
    assert rules.refusal(call) is None and rules.limits_batches([call])
    half = FusedCall(Form.DECODE, "torch.float16", 8, 2, 128, 128)
    assert "bfloat16" in rules.refusal(half)
    small = FusedCall(Form.DECODE, "torch.bfloat16", 8, 2, 128, 16)
    assert "blocks of 128" in rules.refusal(small)
    assert release_of("8.2.RC1") is None
    assert release_of("") is release_of("9.1.0") is release_of("10.0")
    assert FIA.max_head_size == 256, "no release takes more without latent attention"
