"""Contexts shared among ranks in plain scalar loops: a part of `vllm_npu_prep.prep.oracle`.

``dcp`` are three integers: the ranks, the step's own, and how many neighbouring tokens one keeps.
"""

from typing import Any


def rank_of(position: int, dcp: tuple[int, int, int]) -> int:
    """Deal tokens to the ranks like cards, so many at a time."""
    ranks, _, neighbours = dcp
    return position // neighbours % ranks


def place_on_its_rank(position: int, block_size: int, dcp: tuple[int, int, int]) -> tuple[int, int]:
    """Column and offset of a token: those that its rank keeps stand one after the other."""
    ranks, _, neighbours = dcp
    rank = rank_of(position, dcp)
    whole_rounds = position // (neighbours * ranks)
    before = whole_rounds * neighbours
    for earlier in range(whole_rounds * neighbours * ranks, position):
        before += rank_of(earlier, dcp) == rank
    return before // block_size, before % block_size


def share_out(out: dict[str, Any], dcp: tuple[int, int, int]) -> None:
    """Count what the step's rank keeps of each request."""
    mine = dcp[1]
    out["dcp_ranks"] = [rank_of(position, dcp) for position in out["positions"]]
    for name, lengths in (
        ("dcp_local_seq_lens", out["seq_lens"]),
        ("dcp_local_context_lens", out["num_computed_tokens"]),
    ):
        round_of_all = dcp[0] * dcp[2]
        out[name] = [
            length // round_of_all * dcp[2]
            + sum(rank_of(p, dcp) == mine for p in range(length % round_of_all))
            for length in lengths
        ]
