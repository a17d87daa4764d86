"""Valid calls of the operators of experts, and calls that break one demand each."""

import torch

INIT_ROUTING = "npu::npu_moe_init_routing_v2"
TOKEN_UNPERMUTE = "npu::_npu_moe_token_unpermute"
FINALIZE_ROUTING = "npu::npu_moe_finalize_routing"
GATING = "npu::npu_moe_gating_top_k"
GATING_SOFTMAX = "npu::npu_moe_gating_top_k_softmax_v2"
GROUPED_MATMUL = "npu::npu_grouped_matmul"

IDS = [[5, 1], [2, 0], [6, 6], [3, 2], [-1, -1], [1, 3]]
"""Experts 0 to 5 and 6 for none; experts 1 to 3 are active."""


def random(*shape, dtype=torch.float16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routing_arguments(seed=0, dtype=torch.float16, **changes):
    """Six tokens with two experts each, of which three experts are active."""
    return {
        "x": random(6, 8, dtype=dtype, seed=seed),
        "expert_idx": torch.tensor(IDS, dtype=torch.int32),
        "active_num": 12,
        "expert_num": 7,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [1, 4],
        **changes,
    }


def unpermute_arguments(seed=0, dtype=torch.float16, **changes):
    """Three tokens with two rows each; one row is past the end, one has no probability."""
    return {
        "permuted_tokens": random(6, 8, dtype=dtype, seed=seed),
        "sorted_indices": torch.tensor([3, 0, 9, 5, 1, -1], dtype=torch.int32),
        "probs": torch.tensor([[0.5, 0.25], [0.9, 0.1], [1.0, 0.0]]),
        **changes,
    }


def finalize_arguments(seed=0, dtype=torch.bfloat16, **changes):
    """Four tokens with two rows each: of one both lack a row, of two the first or the second."""
    return {
        "expanded_permuted_rows": random(8, 1, 16, dtype=dtype, seed=seed),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": torch.tensor([[0.5, 0.25], [0.9, 0.1], [1.0, 0.3], [0.7, 0.2]]).to(dtype),
        "expanded_src_to_dst_row": torch.tensor([3, 0, -1, 2, -1, -1, 1, -1], dtype=torch.int32),
        "export_for_source_row": None,
        "drop_pad_mode": 3,
        **changes,
    }


def gating_arguments(seed=0, dtype=torch.float32, **changes):
    """Five tokens and twelve experts in four groups, with a bias."""
    return {
        "x": random(5, 12, dtype=dtype, seed=seed),
        "k": 3,
        "bias": random(12, dtype=dtype, seed=seed + 1) / 4,
        "k_group": 2,
        "group_count": 4,
        "group_select_mode": 1,
        "norm_type": 1,
        **changes,
    }


def softmax_arguments(seed=0, dtype=torch.float32, **changes):
    """Five tokens and twelve experts; the last token is finished."""
    finished = torch.tensor([False] * 4 + [True])
    return {"x": random(5, 12, dtype=dtype, seed=seed), "k": 3, "finished": finished, **changes}


def rows_arguments(seed=0, dtype=torch.float16, **changes):
    """Seven rows in three groups, of which five belong to a group; transposed weights."""
    return {
        "x": [random(7, 8, dtype=dtype, seed=seed)],
        "weight": [random(3, 6, 8, dtype=dtype, seed=seed + 1).transpose(1, 2)],
        "group_list": torch.tensor([2, 0, 3]),
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 2,
        **changes,
    }
