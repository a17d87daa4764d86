"""Operators that send tokens to the ranks of their experts, between emulated devices."""

import json
import re

import numpy as np
import pytest

EXPERTS = """
import json

EXPERTS, K, H = 8, 2, 64

def group():
    return dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())

def tokens(rank, n=6):
    # also which of them have experts: none on rank 1, all on others but for the last
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(n, H, generator=generator).bfloat16()
    ids = torch.rand(n, EXPERTS, generator=generator).argsort(1)[:, :K].int()
    weights = torch.rand(n, K, generator=generator)
    return x, ids, weights, torch.arange(n) < (0 if rank == 1 else n - 1)

def where(rank):
    count = dist.get_world_size()
    return {"group_ep": group(), "ep_world_size": count, "ep_rank_id": rank,
            "moe_expert_num": EXPERTS}

def there_and_back(rank, given, scale=lambda expert: expert + 1, **how):
    # the experts multiply their rows by a number of their own
    x, ids, weights, mask = (each.npu() for each in given)
    rows, scales, assist, numbers, counts, _, expand_scales = (
        torch_npu.npu_moe_distribute_dispatch_v2(x, ids, x_active_mask=mask, **how, **where(rank)))
    if how.get("quant_mode") == 2:
        rows = (rows.float() * scales[:, None]).bfloat16()
    local = EXPERTS // dist.get_world_size()
    factors = torch.arange(rank * local, (rank + 1) * local).float() + 1
    expert_of = torch.repeat_interleave(torch.arange(local), numbers.cpu())
    rows[: len(expert_of)] *= factors[expert_of].npu()[:, None].bfloat16()
    return torch_npu.npu_moe_distribute_combine_v2(
        rows, ids, assist, counts, weights, x_active_mask=mask, expand_scales=expand_scales,
        **where(rank)), numbers

def expected(given):
    x, ids, weights, mask = given
    rows = (x[:, None] * (ids + 1)[..., None].bfloat16()).float()
    return (rows * weights[..., None]).sum(1)[mask].bfloat16()
"""


@pytest.mark.parametrize("count", [2, 4])
def test_each_token_gets_the_sum_of_its_experts(ranks, count):
    """Beside a rank without tokens, in a graph, too; tokens without experts are undefined."""
    run = ranks(
        EXPERTS
        + f"COUNT = {count}"
        + """
def rank_main(rank):
    given = tokens(rank)
    mask = given[3]
    with emulator.count() as counts:
        got, numbers = there_and_back(rank, given)
    rounded, _ = there_and_back(rank, given, quant_mode=2)

    x, ids, weights, active = (each.npu() for each in given)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        rows, _, assist, _, ends, _, scales = torch_npu.npu_moe_distribute_dispatch_v2(
            x, ids, x_active_mask=active, **where(rank))
        out = torch_npu.npu_moe_distribute_combine_v2(
            rows, ids, assist, ends, weights, x_active_mask=active, expand_scales=scales,
            **where(rank))
    replayed = []
    for seed in (10, 20):
        other = tokens(rank + seed)
        for target, source in zip((x, ids, weights, active), other):
            target.copy_(source)
        graph.replay()
        plain = (other[0][:, None].float() * other[2][..., None]).sum(1).bfloat16()
        replayed.append([each[other[3]].tolist() for each in (out.cpu(), plain)])
    return {"sums": [got.cpu()[mask].tolist(), expected(given).tolist()],
            "rounded": rounded.cpu()[mask].tolist(), "others": got.cpu()[~mask].tolist(),
            "replayed": replayed, "numbers": numbers.tolist(),
            "ids": given[1][mask].flatten().tolist(), "sent": counts.sent_bytes}

print(json.dumps(run_ranks(rank_main, COUNT)))
        """
    )
    told = json.loads(run.out.splitlines()[-1])
    for rank in told:
        got, sums = rank["sums"]
        assert got == sums
        # A level of a row is 1 / 127 of its maximum, and experts multiply it by up to 8.
        np.testing.assert_allclose(rank["rounded"], sums, rtol=0.01, atol=0.25)
        assert np.isnan(rank["others"]).all()
        for got, sums in rank["replayed"]:
            assert got == sums
    ids = [each for rank in told for each in rank["ids"]]
    numbers = [number for rank in told for number in rank["numbers"]]
    assert numbers == np.bincount(ids, minlength=8).tolist()
    assert told[1]["sent"] < told[0]["sent"]  # rank 1 has no tokens, and returns rows
    assert not run.report["hazards"]


def test_ranks_that_differ_or_die_are_named_on_all(ranks):
    """In an exchange: nothing hangs, and each rank gets one line."""
    run = ranks(
        EXPERTS
        + """
def rank_main(rank):
    there_and_back(rank, tokens(rank))
    torch.npu.synchronize()
    if rank == 1 and case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    torch.npu.synchronize()
    x, ids, weights, mask = (each.npu() for each in tokens(rank, 6 + rank * (case == "tokens")))
    if rank == 1 and case == "operator":
        dist.all_reduce(ones())
    else:
        torch_npu.npu_moe_distribute_dispatch_v2(x, ids, x_active_mask=mask, **where(rank))
    return sync_error()

told = []
for case, how in (("dies", {"codes": [0, -9]}), ("operator", {}), ("tokens", {})):
    told += run_ranks(rank_main, **how)
print(json.dumps(told))
        """
    )
    alone, nobody, *others, first, second = json.loads(run.out.splitlines()[-1])
    assert "rank 1 (process" in alone and "died while it was waited for" in alone
    assert "rank 0 is in MoeDistributeDispatchV2" in alone and nobody is None
    calls = "rank 0 calls MoeDistributeDispatchV2 .*, rank 1 calls HcclAllReduce"
    assert len(others) == 2
    for text in others:
        assert re.search(f"ranks 0 and 1 disagree: {calls}", text), text
    assert "given [6, 64, 2, 8, 0, 1], [7, 64, 2, 8, 0, 1] on rank 1" in first
    assert "given [7, 64, 2, 8, 0, 1], [6, 64, 2, 8, 0, 1] on rank 0" in second
