"""Valid calls of the operators that exchange tokens; the other ranks do what this one does."""

import functools

import torch

from ascend_emulator.operators import moe_distribute
from tests.emulator.operators.formula import random

WHERE = {"group_ep": "experts", "ep_world_size": 2, "ep_rank_id": 0, "moe_expert_num": 4}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def dispatch(seed=0, **changes):
    """Three tokens on each of two ranks, one without experts; the others have this rank's."""
    return {
        "x": random(3, 32, dtype=torch.bfloat16, seed=seed),
        "expert_ids": int32([1, 0], [0, 1], [-1, -1]),
        **WHERE,
        "x_active_mask": torch.tensor([True, True, False]),
        **changes,
    }


@functools.cache
def dispatched():
    return moe_distribute.dispatch(**dispatch())


def combine(**changes):
    """Return the rows as they came."""
    rows, _, assist, _, counts, _, _ = dispatched()
    given = dispatch()
    return {
        "expand_x": rows,
        "expert_ids": given["expert_ids"],
        "assist_info_for_combine": assist,
        "ep_send_counts": counts,
        "expert_scales": torch.tensor([[0.5, 0.25], [1, 2], [3, 4]]),
        **WHERE,
        "x_active_mask": given["x_active_mask"],
        "expand_scales": torch.zeros(len(rows)),
        **changes,
    }
