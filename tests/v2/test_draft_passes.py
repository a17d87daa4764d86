"""How many tokens a draft pass runs with, where data-parallel ranks share experts."""

from types import SimpleNamespace

import pytest
from vllm.v1.worker.gpu import dp_utils

from vllm_npu_prep.runner.v2.draft_passes import DraftPasses


@pytest.mark.parametrize(
    ("ours", "other", "padded", "across"),
    [(1, 3, 4, [4, 4]), (3, 1, 4, [4, 4]), (2, 2, 2, [2, 2]), (1, 9, 0, [1, 9])],
)
def test_ranks_agree_on_the_size_of_the_largest(monkeypatch, ours, other, padded, across):
    """Without a graph for one rank's tokens, no rank replays one."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=2, data_parallel_rank=0)
    )
    passes = DraftPasses(config, "cpu", 8, reads_target=True, num_dims=0)
    passes.sizes = [2, 4, 8]

    def all_reduce(told, group=None):
        """Add what the other rank tells of its step: tokens, and whether it has a graph."""
        told[:, 1] = told[:, 0]
        told[0, 1] = told[5, 1] = other
        told[1, 1] = 0 if other > max(passes.sizes) else told[1, 0]

    group = SimpleNamespace(cpu_group=None, cpu_all_reduce_=all_reduce)  # the latter of 0.33.0
    monkeypatch.setattr(dp_utils, "dist", SimpleNamespace(all_reduce=all_reduce), raising=False)
    monkeypatch.setattr(dp_utils, "get_dp_group", lambda: group)
    monkeypatch.setattr(dp_utils, "should_skip_dp_coordination", lambda: False)
    size = passes.size_of(ours)
    assert (size.padded, size.across.tolist()) == (padded, across)
