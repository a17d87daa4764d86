"""Valid calls of ``npu_fusion_attention``, and calls that break one constraint each."""

import torch

from tests.emulator.operators.calls import Batch, call, spoiled, strided, triangle

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


def changed(**functions):
    arguments = spoiled(fusion_arguments(Batch(SAME_KEYS)), **functions)
    return lambda: call(FUSION, arguments)


def given(**changes):
    return lambda: fusion(**changes)


def hidden_row():
    mask = torch.zeros(130, 130, dtype=torch.bool)
    mask[2] = True
    return mask


FUSION_VIOLATIONS = {
    "layout": [given(input_layout="BSND")],
    "dtype": [
        changed(query=torch.Tensor.double),
        changed(key=torch.Tensor.float),
        changed(value=torch.Tensor.bfloat16),
    ],
    "contiguous": [changed(query=strided), changed(key=strided), changed(value=strided)],
    "rank": [changed(query=lambda q: q.flatten(1))],
    "key and value shapes": [
        changed(value=lambda v: v[:, :, :8].contiguous()),
        changed(query=lambda q: q[:, :, :8].contiguous()),
    ],
    "head_num": [
        given(head_num=2),
        changed(query=lambda q: q[:, :3].contiguous(), head_num=lambda n: 3),
    ],
    "head size": [lambda: fusion(Batch([(0, 2)], head_size=784))],
    "tokens": [
        changed(
            query=lambda q: torch.empty((1 << 20) + 1, *q.shape[1:], dtype=q.dtype, device="meta")
        )
    ],
    "lengths required": [
        given(actual_seq_qlen=None),
        given(actual_seq_kvlen=torch.tensor([5, 6, 136, 140])),
    ],
    "number of lengths": [
        lambda: fusion(Batch([(0, 1)] * 1025)),
        given(actual_seq_kvlen=[6, 136, 140]),
    ],
    "cumulative lengths": [
        given(actual_seq_qlen=[5, 1, 130, 4]),
        given(actual_seq_kvlen=[5, 6, 136, 139]),
        given(actual_seq_qlen=[5, 0, 136, 140]),
    ],
    "sparse_mode": [given(**band(3, sparse_mode=2))],
    "mask dtype": [given(**band(3, atten_mask=triangle(torch.int8)))],
    "mask shape": [
        given(**band(3, atten_mask=triangle(torch.uint8)[:130, :130])),
        given(atten_mask=torch.zeros(130, 131, dtype=torch.bool)),
    ],
    "visible rows": [given(atten_mask=hidden_row())],
    "band is not empty": [given(**band(3, next_tockens=-4))],
    "keep_prob": [given(keep_prob=0.9)],
    "unsupported argument": [
        given(pse=torch.zeros(1, 4, 1024, 130)),
        given(padding_mask=torch.zeros(4)),
        given(prefix=[1, 1, 1, 1]),
        given(sink=torch.zeros(4)),
        given(dropout_mask=torch.zeros(4)),
    ],
}
