"""Attention and cache writes, through both kernel families as layers call them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_npu_prep.attention.context_parallel import (
    merge_partials,
    only_rows,
    own_of,
    rows_of,
)
from vllm_npu_prep.attention.kernels import Attended, make_kernels
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.verify.outcome import Outcome, Verdict, worst_of
from vllm_npu_prep.verify.row import DTYPES, Row, RowContext, compare
from vllm_npu_prep.verify.steps import (
    CHUNKS,
    DECODES,
    PROMPTS,
    AttentionForm,
    AttentionStep,
    layer_of,
    masks_for,
)

PROMPT = AttentionState.PrefillNoCache
DECODE = AttentionState.DecodeOnly
CHUNK = AttentionState.ChunkedPrefill

GROUPED = layer_of(4, 2, 128)
BASE = AttentionForm(CHUNK, CHUNKS, GROUPED, torch.bfloat16)

OPERATORS = {"fia": "fused attention", "atb": "atb attention"}
"""The names of the families' operators in the tables."""

FORMS: dict[str, tuple[str, AttentionForm]] = {
    "prompt": (
        "prompts over their own K and V",
        replace(BASE, state=PROMPT, lengths=PROMPTS),
    ),
    "decode": ("decodes without a mask", replace(BASE, state=DECODE, lengths=DECODES)),
    "chunk": ("chunks, prompts and decodes in one step", BASE),
    "window-prompt": (
        "prompts with a window",
        replace(BASE, state=PROMPT, lengths=PROMPTS, window=4),
    ),
    "window-decode": (
        "decodes with a window",
        replace(BASE, state=DECODE, lengths=DECODES, window=4),
    ),
    "window-chunk": ("chunks with a window", replace(BASE, window=7)),
    "encoder": (
        "encoders: each token sees all of its request",
        replace(BASE, state=PROMPT, lengths=PROMPTS, block_size=0, causal=False),
    ),
    "window-encoder": (
        "encoders with a window both ways",
        replace(BASE, state=PROMPT, lengths=PROMPTS, block_size=0, causal=False, window=4),
    ),
    "padding": (
        "padding rows of a decode graph: length 1 over the null block, slot -1",
        replace(BASE, state=DECODE, lengths=DECODES, num_padding=3),
    ),
}
"""Forms that both families have: what they are, and the step."""

VARIANTS: dict[str, tuple[str, int, int, int]] = {
    "equal-heads-prompt": ("as many K/V heads as heads", 2, 2, 128),
    "equal-heads-decode": ("as many K/V heads as heads", 2, 2, 128),
    "equal-heads-chunk": ("as many K/V heads as heads", 2, 2, 128),
    "one-kv-head-decode": ("one K/V head", 4, 1, 128),
    "one-kv-head-chunk": ("one K/V head", 4, 1, 128),
    "head-64-decode": ("heads of 64", 4, 2, 64),
    "head-64-chunk": ("heads of 64", 4, 2, 64),
}
"""Some of these forms, by the ends of the names, with other heads: heads, K/V heads, head size."""


def _step(family: str, form: AttentionForm, context: RowContext) -> AttentionStep:
    return AttentionStep(form, context.device.device, make_kernels(family))


def _written(
    family: str, form: AttentionForm, context: RowContext
) -> tuple[AttentionStep, AscendMetadata]:
    """Return a step whose own K and V are in the cache, and its metadata."""
    step = _step(family, form, context)
    metadata = step.metadata()
    step.write(metadata)
    return step, metadata


def run_form(family: str, form: AttentionForm, context: RowContext) -> Outcome:
    return _step(family, form, context).run()


def _row(family: str, name: str, what: str, form: AttentionForm) -> Row:
    what = f"{OPERATORS[family]}, {what}"
    return Row(f"{family}-{name}", what, partial(run_form, family, form))


def _common() -> Iterator[Row]:
    for family in OPERATORS:
        for name, (what, form) in FORMS.items():
            for short, dtype in DTYPES.items():
                typed = replace(form, dtype=dtype)
                yield _row(family, f"{name}-{short}", what, typed)
        for name, (heads, *sizes) in VARIANTS.items():
            what, form = FORMS[name.rpartition("-")[2]]
            form = replace(form, layer=layer_of(*sizes))
            yield _row(family, name, f"{what}, {heads}", form)


# ------------------------------------------------------------------------- fused attention alone


def shared_blocks(family: str, context: RowContext) -> Outcome:
    """Let requests share their first block, as after a hit in the prefix cache."""
    lengths = ((130, 1), (140, 1), (128, 1), (150, 1))
    return run_form(family, replace(BASE, state=DECODE, lengths=lengths, num_shared=1), context)


def zero_lengths(family: str, context: RowContext) -> Outcome:
    """Put rows without keys beside others: the others must be right, theirs are only reported."""
    many = DECODES * 5  # kernels of some releases treat batches from 24 requests on differently
    form = replace(BASE, state=DECODE, lengths=many, num_padding=2, padding_len=0)
    step, metadata = _written(family, form, context)
    output = step.attend(metadata)
    outcome = step.check_attention(output)
    empty = output[step.num_tokens :].cpu()
    held = "zeros" if not empty.any() else "NaN" if empty.isnan().any() else "other numbers"
    if outcome.verdict is Verdict.SAME:
        outcome = replace(outcome, got=f"{outcome.got}; rows without keys hold {held}")
    return outcome


def past_the_constant(context: RowContext) -> Outcome:
    """Try sequences longer than the constant mask, which has 2048 rows and columns."""
    layer = layer_of(2, 1, 64)
    long = replace(BASE, lengths=((2500, 20), (2040, 16)), layer=layer)
    plain = run_form("fia", long, context)
    windowed = run_form("fia", replace(long, window=2100), context)
    return worst_of([plain, windowed], f"{plain.given}; also with window 2100")


def unpaged(dtype: torch.dtype, context: RowContext) -> Outcome:
    """Try fused attention over fresh K and V in mode 0, for which a plain average was reported.

    The plugin calls another operator for encoders (vllm-project/vllm-ascend 13699).
    """
    form = replace(FORMS["encoder"][1], dtype=dtype)
    step = _step("fia", form, context)
    ends = torch.tensor(form.query_lens).cumsum(0).tolist()
    output, _ = torch.ops.npu.npu_fused_infer_attention_score(
        step.query(),
        step.own(step.keys),
        step.own(step.values),
        **_shape_of(step),
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=ends,
    )
    return step.check_attention(output)


def lse(wanted: bool, context: RowContext) -> Outcome:
    """Ask for the second result, or not, in decodes over the cache without a mask."""
    form = replace(BASE, state=DECODE, lengths=DECODES)
    step, metadata = _written("fia", form, context)
    key, value = (plane.flatten(2) for plane in step.kv_cache)
    output, found = torch.ops.npu.npu_fused_infer_attention_score(
        step.query(),
        key,
        value,
        **_shape_of(step),
        actual_seq_lengths=[*range(1, len(DECODES) + 1)],
        actual_seq_lengths_kv=form.seq_lens,
        block_table=metadata.block_tables,
        block_size=form.block_size,
        softmax_lse_flag=wanted,
    )
    attended = step.check_attention(output)
    if not wanted:  # undocumented: the plugin gives an empty tensor and reads nothing
        return replace(attended, got=f"{attended.got}; softmax_lse of shape {[*found.shape]}")
    expected = step.expected_lse()[..., None]
    second = compare(found, expected, f"softmax_lse of {form}", tolerance=2e-2)
    return worst_of([second, attended], str(form))


def shared_contexts(dtype: torch.dtype, context: RowContext) -> Outcome:
    """Attend over two halves of the contexts and over the step's own tokens, and merge the results.

    The halves are cut as decode context parallelism cuts them.
    """
    form = replace(BASE, dtype=dtype, layer=layer_of(4, 1, 128))
    step = _step("fia", form, context)
    metadata = step.metadata()
    parts: list[tuple[AscendMetadata, torch.Tensor | None, torch.Tensor]] = [
        (own_of(metadata, metadata.attn_mask), None, step.kv_cache)
    ]
    for rank in range(2):
        lens = np.array([len(range(rank, length, 2)) for length in form.contexts], np.int32)
        shared = rows_of(metadata, context.put(torch.from_numpy(lens)), lens)
        parts.append((shared.rows, shared.has_rows, context.put(step.cache_of_every(2, rank))))
    shares = []
    for rows, has_rows, cache in parts:
        query = step.query()
        lse = torch.full(query.shape[:2], float("nan"), device=query.device)
        share = Attended(torch.full_like(query, float("nan")), lse)
        own = (step.own(step.keys), step.own(step.values)) if rows.causal else None
        arguments = query, own, cache, rows, form.layer, share.output
        step.kernels.attend(*arguments, lse=share.lse)
        shares.append(only_rows(share, has_rows))
    merged = merge_partials(shares)
    second = compare(merged.lse, step.expected_lse(), f"softmax_lse of {form}", tolerance=2e-2)
    return worst_of([step.check_attention(merged.output), second], f"{form}, in three parts")


def _shape_of(step: AttentionStep) -> dict[str, Any]:
    layer = step.form.layer
    return {
        "num_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "scale": layer.scale,
        "input_layout": "TND",
        "sparse_mode": 0,
    }


def with_workspace(family: str, context: RowContext) -> Outcome:
    """Give a workspace from outside, as a graph's tasks do; it must be large enough."""
    form = replace(BASE, state=DECODE, lengths=DECODES)
    step, metadata = _written(family, form, context)
    query = step.query()
    output = torch.full_like(query, float("nan"))
    call = step.call("layer", output, query)
    workspace = step.kernels.workspace(call, metadata)
    assert workspace is not None, "no workspace was made"
    replace(call, workspace=workspace)(metadata)
    outcome = step.check_attention(output)
    return replace(outcome, given=f"{outcome.given}; workspace of {workspace.nbytes:,} bytes")


def several_layers(family: str, context: RowContext) -> Outcome:
    """Run two layers in turn over caches of their own, with one metadata; none may be mixed up."""
    kernels = make_kernels(family)
    form = replace(BASE, lengths=((130, 1), (9, 3)))
    steps = [AttentionStep(form, context.device.device, kernels) for _ in range(2)]
    metadata = steps[0].metadata()
    steps[1].kv_cache.neg_()  # the other layer's K and V, in the same blocks
    parts = []
    for step, sign in zip(steps, (1, -1)):
        step.keys, step.values = ([sign * r for r in rows] for rows in (step.keys, step.values))
        step.write(metadata)
        parts.append(step.check_attention(step.attend(metadata)))
    return worst_of(parts, f"two layers; {form}")


def _special() -> Iterator[Row]:
    for family, operator in OPERATORS.items():
        for name, what, run in (
            ("shared-blocks", "requests that share a block", shared_blocks),
            ("zero-lengths", "rows without keys beside others", zero_lengths),
            ("workspace", "a workspace from the caller", with_workspace),
            ("layers", "two layers with one metadata", several_layers),
        ):
            yield Row(f"{family}-{name}", f"{operator}, {what}", partial(run, family))
    for size in (128, 256, 384, 512):
        form = replace(BASE, block_size=size, lengths=((300, 1), (700, 1), (0, 23), (size, 8)))
        row = _row("fia", f"block-{size}", f"blocks of {size}", form)
        # The documentation allows 128 alone; code of CANN 9.x takes multiples of 16 up to 512
        yield row if size == 128 else replace(row, instead="use --block-size 128")
    for size in (16, 64):
        form = replace(BASE, block_size=size, lengths=((30, 1), (100, 1), (0, 23), (size, 8)))
        yield _row("atb", f"block-{size}", f"blocks of {size}", form)
    what = "fused attention, sequences longer than the constant mask"
    yield Row("fia-long", what, past_the_constant)
    what = "fused attention over fresh K and V without a mask; the plugin avoids this form"
    for short, dtype in DTYPES.items():
        yield Row(f"fia-unpaged-{short}", what, partial(unpaged, dtype))
    what = "fused attention, softmax_lse asked for"
    yield Row("fia-lse", what, partial(lse, True))
    what = "fused attention with sums over parts of contexts, as ranks share them, merged"
    for short, dtype in DTYPES.items():
        yield Row(f"fia-shared-{short}", what, partial(shared_contexts, dtype))
    what = "fused attention, softmax_lse not asked for"
    yield Row("fia-no-lse", what, partial(lse, False))


# ------------------------------------------------------------------------- cache writes


def cache_write(family: str, dtype: torch.dtype, context: RowContext) -> Outcome:
    """Write tokens of which some have slot -1; every cell of both planes is compared."""
    lengths = ((0, 3), (126, 5), (40, 1))
    form = replace(BASE, lengths=lengths, dtype=dtype, num_padding=4, block_size=128)
    step = _step(family, form, context)
    step.write(step.metadata())
    return replace(step.check_cache(), given=f"9 tokens, 4 slots of -1, {form.dtype}, 2 heads")


def all_padding(family: str, context: RowContext) -> Outcome:
    step = _step(family, BASE, context)
    slots = torch.full((step.num_tokens,), -1, dtype=torch.int32, device=context.device.device)
    step.kernels.write_kv(step.own(step.keys), step.own(step.values), step.kv_cache, slots)
    expected = step.host_cache
    given = f"{step.num_tokens} slots of -1"
    return compare(step.kv_cache, expected, given, tolerance=0.0, where=("plane", "block", "slot"))


def _writes() -> Iterator[Row]:
    names = {"fia": "npu_scatter_pa_kv_cache", "atb": "_npu_reshape_and_cache"}
    for family, operator in names.items():
        what = f"cache write by {operator}"
        for short, dtype in DTYPES.items():
            run = partial(cache_write, family, dtype)
            yield Row(f"write-{family}-{short}", what, run)
        name, run = f"write-{family}-padding-only", partial(all_padding, family)
        yield Row(name, f"{what}, padding only", run)


# ------------------------------------------------------------------------- masks


def constant_mask(context: RowContext) -> Outcome:
    family = make_kernels("fia").family
    made = masks_for(family, torch.bfloat16, context.device.device, 256).constant()
    rows = torch.arange(2048)
    expected = (rows[None, :] > rows[:, None]).to(torch.int8)
    return compare(made, expected, "int8 2048 x 2048", where=("row", "column"))


def dense_mask(dtype: torch.dtype, context: RowContext) -> Outcome:
    parts = []
    for state, form in ((PROMPT, "prompt"), (CHUNK, "chunk")):
        step_form = replace(FORMS[form][1], dtype=dtype, window=7, lengths=((0, 20), (0, 9)))
        step = _step("atb", step_form, context)
        made = step.metadata().attn_mask
        assert made is not None
        positions = range(20) if state == PROMPT else [*range(20), *range(9)]
        masked = {"prompt": 1.0, "chunk": -10000.0}[form] if dtype == torch.bfloat16 else -torch.inf
        expected = torch.tensor(
            [[0.0 if p - 7 < column <= p else masked for column in range(20)] for p in positions]
        ).to(dtype)
        parts.append(compare(made, expected, form, tolerance=0.0, where=("row", "column")))
    return worst_of(parts, f"matrix and rows, window 7, {dtype}")


def _masks() -> Iterator[Row]:
    yield Row("mask-constant", "the constant mask as the device makes it", constant_mask)
    for short, dtype in DTYPES.items():
        yield Row(
            f"mask-dense-{short}", "dense masks as atb takes them", partial(dense_mask, dtype)
        )


ROWS: tuple[Row, ...] = (*_common(), *_special(), *_writes(), *_masks())
