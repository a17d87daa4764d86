"""Valid calls of ``npu_fusion_attention``, and calls that break one constraint each."""

import torch

from tests.emulator.operators.calls import Batch, call, triangle

FUSION = "npu::npu_fusion_attention"
SAME_KEYS = [(0, 5), (0, 1), (0, 130), (0, 4)]
MORE_KEYS = [(3, 5), (20, 1), (7, 30)]


def fusion_arguments(batch, **changes):
    """Arguments over fresh K and V, without a mask."""
    return {
        "query": batch.query,
        "key": torch.cat(batch.keys),
        "value": torch.cat(batch.values),
        "head_num": batch.heads[0],
        "input_layout": "TND",
        "scale": batch.scale,
        "actual_seq_qlen": batch.cumulative(batch.query_lens),
        "actual_seq_kvlen": batch.cumulative(batch.kv_lens),
    } | changes


def fusion(batch=None, **changes):
    """Call the reference; ``attention_out``."""
    return call(FUSION, fusion_arguments(batch or Batch(SAME_KEYS), **changes))[0]


def band(size, **changes):
    """Arguments of a window of so many tokens both ways."""
    mask = triangle(torch.uint8)
    limits = {"pre_tockens": size, "next_tockens": size}
    return {"atten_mask": mask, "sparse_mode": 4, **limits, **changes}
