"""Decode context parallelism in plain scalar loops: a part of `vllm_npu_prep.prep.oracle`.

``dcp`` is three integers: the number of ranks, the step's own rank, and how many neighbouring
tokens one rank keeps.
"""

from typing import Any


def rank_of(position: int, dcp: tuple[int, int, int]) -> int:
    """Return the rank of a token: tokens are dealt like cards, several neighbours at a time."""
    ranks, _, neighbours = dcp
    return position // neighbours % ranks


def place_on_its_rank(position: int, block_size: int, dcp: tuple[int, int, int]) -> tuple[int, int]:
    """Return column and offset of a token; those that its rank keeps stand one after another."""
    ranks, _, neighbours = dcp
    rank = rank_of(position, dcp)
    whole_rounds = position // (neighbours * ranks)
    before = whole_rounds * neighbours
    for earlier in range(whole_rounds * neighbours * ranks, position):
        before += rank_of(earlier, dcp) == rank
    return before // block_size, before % block_size


def share_out(out: dict[str, Any], dcp: tuple[int, int, int]) -> None:
    """Add the rank of each token, and how many tokens of each request the step's rank keeps."""
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
