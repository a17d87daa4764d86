"""Calls of the operators that send tokens to the ranks of their experts and bring them back."""

import os
from unittest.mock import patch

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.moe_distribute import COMBINE, DISPATCH
from tests.emulator.operators import exchange_calls
from tests.emulator.operators.exchange_calls import int32
from tests.emulator.operators.violations.breaking import every, in_profile, of, zeros

T = torch.Tensor
FAMILIES = {}


def where(variables, violate):
    """The call with variables of the environment."""

    def run():
        with patch.dict(os.environ, variables):
            return violate()

    return run


def on_a3(violate):
    return where({profiles.SOC: "Ascend910_9391"}, violate)


def ids(rows, top_k=2):
    return torch.arange(top_k, dtype=torch.int32).expand(rows, top_k)


def halves(*shape):
    return zeros(*shape, dtype=torch.bfloat16)


dispatches = of(DISPATCH, exchange_calls.dispatch)
combines = of(COMBINE, exchange_calls.combine)
BOTH = dispatches, combines

COMMON = [
    ("shared experts", *every(BOTH, shared_expert_rank_num=1), *every(BOTH, tp_world_size=2)),
    (
        "algorithm",
        *every(BOTH, comm_alg="hierarchy"),
        *(
            where({"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}, each())
            for each in BOTH
        ),
    ),
    ("group", *every(BOTH, group_ep=""), *every(BOTH, group_ep="x" * 128)),
    (
        "ranks",
        *every(BOTH, ep_world_size=9),
        *every(BOTH, ep_world_size=1),
        *(in_profile("8.5", each()) for each in BOTH),
        *(on_a3(each(ep_world_size=769)) for each in BOTH),
    ),
    ("place", *every(BOTH, ep_rank_id=2)),
    (
        "experts",
        *every(BOTH, moe_expert_num=5),
        *every(BOTH, moe_expert_num=1026),
        *(in_profile("8.5", each(ep_world_size=8, moe_expert_num=200)) for each in BOTH),
    ),
    ("ids dtype", *every(BOTH, expert_ids=T.long)),
    ("mask", *every(BOTH, x_active_mask=T.int), *every(BOTH, x_active_mask=lambda m: m[:2])),
    ("order of the mask", *every(BOTH, x_active_mask=torch.tensor([True, False, True]))),
    ("global_bs", *every(BOTH, global_bs=4), *every(BOTH, global_bs=7)),
    ("mask of uneven ranks", *every(BOTH, global_bs=8)),
    ("ids", *every(BOTH, x_active_mask=None), *every(BOTH, expert_ids=lambda ids: ids + 4)),
    ("distinct ids", *every(BOTH, expert_ids=int32([1, 1], [0, 1], [0, 0]))),
    ("K", *every(BOTH, expert_ids=int32(*[[0, 1, 2, 3, 4]] * 3))),
]

FAMILIES["npu_moe_distribute_dispatch_v2"] = [
    ("unsupported argument", dispatches(tp_rank_id=1), dispatches(zero_expert_num=1)),
    ("dtype", dispatches(x=T.float)),
    ("shapes", dispatches(x=lambda x: x[:2]), dispatches(x=lambda x: x[0])),
    ("quant_mode", dispatches(quant_mode=1)),
    ("scales", dispatches(scales=zeros(4, 32, dtype=torch.float32)), dispatches(scales=zeros(4))),
    ("token numbers", dispatches(expert_token_nums_type=2)),
    ("ids shape", dispatches(expert_ids=lambda ids: ids[:, 0])),
    ("tokens", dispatches(x=halves(257, 32), expert_ids=ids(257), x_active_mask=None)),
    ("width", dispatches(x=halves(3, 40)), on_a3(dispatches())),
    ("buffer", where({"HCCL_BUFFSIZE": "4"}, dispatches())),
]
FAMILIES["npu_moe_distribute_combine_v2"] = [
    ("unsupported argument", combines(comm_quant_mode=2), combines(ori_x=zeros(3, 32))),
    ("dtype", combines(expand_x=T.float)),
    ("shape", combines(expand_x=lambda x: x[0])),
    ("rows", combines(expand_x=lambda x: x[:8])),
    ("weights", combines(expert_scales=T.half), combines(expert_scales=lambda w: w[:2])),
    ("expand_scales", combines(expand_scales=None)),
    ("of the dispatch", combines(ep_send_counts=T.long)),
    ("counts of the dispatch", combines(ep_send_counts=int32(4, 4, 8, 8))),
    ("ids shape", combines(expert_ids=lambda ids: ids[:, 0])),
    ("tokens", combines(expert_ids=ids(257), x_active_mask=None)),
    ("width", combines(expand_x=halves(12, 40)), on_a3(combines())),
    ("buffer", where({"HCCL_BUFFSIZE": "4"}, combines())),
]
for number, operator in enumerate(FAMILIES.values()):
    operator += [(name, *calls[number::2]) for name, *calls in COMMON]


def _other_rank_disagrees():
    """Every rank does what this one does, so another one has to be made up."""
    other = torch.tensor([[3, 32, 2, 4, 0, 1, 2, 2, 0, 0], [4, 32, 2, 4, 0, 1, 2, 2, 0, 0]])
    with patch("ascend_emulator.exchange.gather", lambda *given: other):
        dispatches()()


FAMILIES["npu_moe_distribute_dispatch_v2"].append(("agreement", _other_rank_disagrees))
