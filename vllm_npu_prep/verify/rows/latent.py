"""Rows of latent attention. Their calls are those that start-up makes, too."""

from functools import partial

import torch

from vllm_npu_prep.attention.kernels.latent import LatentShape, make_latent_kernels
from vllm_npu_prep.prep.mask import compressed_mask
from vllm_npu_prep.verify.latent import LatentStep, forms_of, shape_of
from vllm_npu_prep.verify.outcome import Outcome
from vllm_npu_prep.verify.row import DTYPES, Record, Row, RowContext

LATENT: tuple[Record, ...] = (
    ("fused attention, rope", "latent rows twice"),
    ("fused attention, rope", "layout with rope"),
)
CONTEXT: tuple[Record, ...] = tuple(
    (operator, name)
    for operator, names in {
        "npu_gather_pa_kv_cache": (
            "block ids",
            "cache form",
            "contiguous",
            "integers",
            "offset",
            "result form",
            "rows",
        ),
        "npu_attention_update": ("head_dim", "lse form", "part form", "parts", "update_type"),
    }.items()
    for name in names
)

WHAT: dict[str, tuple[str, tuple[Record, ...]]] = {
    "decode": ("decodes over latent rows", LATENT),
    "drafts": ("drafts over latent rows", LATENT),
    "prefill": ("prefills over projected rows", CONTEXT),
}
"""The form of a step and the records that it tries, by the name of its rows."""


USUAL = shape_of(4)
WIDE = shape_of(5, size=192, value_size=256)
"""The shape of GLM-4.7-Flash: the number of heads is no power of two; values are as wide as keys
with their rotated part."""


def latent(
    what: str, shape: LatentShape, dtype: torch.dtype, block_size: int, context: RowContext
) -> Outcome:
    form = forms_of(shape, dtype, block_size, 3)[what]
    mask = context.put(torch.from_numpy(compressed_mask()))
    kernels = make_latent_kernels("fia")
    return LatentStep(form, context.device.device, kernels, mask).run()


def with_lse(dtype: torch.dtype, context: RowContext) -> Outcome:
    """Compare decodes and their log-sum-exps, as decode context parallelism asks for them."""
    form = forms_of(USUAL, dtype, 128, 3)["drafts over latent rows"]
    mask = context.put(torch.from_numpy(compressed_mask()))
    return LatentStep(form, context.device.device, make_latent_kernels("fia"), mask).run_with_lse()


def _row(name: str, short: str, shape: LatentShape, instead: str = "") -> Row:
    what, records = WHAT[name]
    is_wide = shape is WIDE
    return Row(
        f"latent-{'wide-' * is_wide}{name}-{short}",
        f"latent attention{', heads of 192 and 256' * is_wide}: {what}",
        partial(latent, what, shape, DTYPES[short], 128),
        records,
        instead=instead,
    )


ROWS = (
    *(
        _row(name, short, USUAL, "use bfloat16" * (name == "prefill" and short == "fp16"))
        for name in WHAT
        for short in DTYPES
    ),
    *(
        Row(
            f"latent-lse-{short}",
            "latent attention: tokens over latent rows, softmax_lse asked for",
            partial(with_lse, dtype),
            (*LATENT, ("fused attention", "softmax_lse out")),
        )
        for short, dtype in DTYPES.items()
    ),
    _row("drafts", "bf16", WIDE),
    _row("prefill", "bf16", WIDE, "use another model, or CANN 9.0 or newer"),
)
