"""Rows of latent attention: the calls that start-up makes, too."""

from functools import partial

import torch

from vllm_npu_prep.attention.kernels.latent import make_latent_kernels
from vllm_npu_prep.prep.mask import compressed_mask
from vllm_npu_prep.verify.latent import LatentStep, forms_of, shape_of
from vllm_npu_prep.verify.row import Bench, Outcome, Record, Row

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

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
"""Form of a step, and what it tries, by the name of its rows."""


def latent(what: str, dtype: torch.dtype, block_size: int, bench: Bench) -> Outcome:
    """A step of latent attention beside its formula."""
    form = forms_of(shape_of(4), dtype, block_size, 3)[what]
    mask = bench.put(torch.from_numpy(compressed_mask()))
    kernels = make_latent_kernels("fia")
    return LatentStep(form, bench.device.device, kernels, mask).run()


ROWS = tuple(
    Row(
        f"latent-{name}-{short}",
        f"latent attention: {what}",
        partial(latent, what, dtype, 128),
        records,
    )
    for name, (what, records) in WHAT.items()
    for short, dtype in DTYPES.items()
)
