"""Prefill context parallelism in plain scalar loops: a part of `vllm_npu_prep.prep.oracle`.

``ranks`` is the number of ranks.
"""

from collections.abc import Sequence
from typing import Any


def ranks_of_tokens(query_lens: Sequence[int], ranks: int) -> list[list[tuple[int, int]]]:
    """Return for each token of each request the rank that computes it, and its chunk.

    A prompt is folded in the middle: its chunks are dealt to ranks up and down again.
    """
    dealt = [*range(ranks), *reversed(range(ranks))]
    found, turn = [], 0
    for query_len in query_lens:
        if query_len == 1:
            found.append([(turn, 0)])
            turn = (turn + 1) % ranks
            continue
        length = 1
        while length * len(dealt) < query_len:
            length += 1
        found.append([(dealt[token // length], token // length) for token in range(query_len)])
    return found


def oracle_pcp_step(
    step: dict[str, Any],  # what `oracle_step` returns, of any group
    *,
    ranks: int,
    rank: int,  # the one that prepares the step
    rank_tokens: int,  # the tokens of each rank, padding included
    max_num_reqs: int,  # the most requests of a step
) -> dict[str, Any]:
    """Return what a rank computes of a step, and what it gets from the others.

    Returns
    -------
    dict
        By the names of the table of arrays: the rank's tokens and rows and the slots of all ranks,
        with padding, and its samples without; the sizes of `vllm_npu_prep.prep.pcp.PCPStep`; and
        ``pcp_ranks``, the rank that computes each token of the batch.
    """
    # Of each rank the tokens of the batch that it computes, and its rows of them
    tokens: list[list[int]] = [[] for _ in range(ranks)]
    rows: list[list[list[int]]] = [[] for _ in range(ranks)]
    lasts: list[list[int]] = [[] for _ in range(ranks)]  # the requests whose last token it has
    owners, token = [], 0
    for request, dealt in enumerate(ranks_of_tokens(step["query_lens"], ranks)):
        before = None
        for owner, chunk in dealt:
            if before != chunk:
                rows[owner].append([])
            before = chunk
            rows[owner][-1].append(token)
            tokens[owner].append(token)
            owners.append(owner)
            token += 1
        lasts[owners[-1]].append(request)
    mine, own_rows = tokens[rank], rows[rank]
    padding = [0] * (rank_tokens - len(mine))
    starts, lengths, computed, requests = [0], [], [], []
    for row in own_rows:
        starts.append(starts[-1] + len(row))
        lengths.append(step["positions"][row[-1]] + 1)
        computed.append(step["positions"][row[0]])
        requests.append(step["req_indices"][row[0]])
    num_rows = len(own_rows)
    longest = max((len(row) for row in own_rows), default=0), max(lengths, default=0)
    while len(lengths) < min(rank_tokens, 2 * max_num_reqs):
        has_token = starts[-1] < rank_tokens
        starts.append(starts[-1] + has_token)
        lengths.append(int(has_token))
        computed.append(0)
        requests.append(max_num_reqs)  # the row of the block tables after those of all requests
    samples = max(len(each) for each in lasts)
    gathered: list[int | None] = []
    slots = []
    for each, requests_of_rank in zip(tokens, lasts):
        slots += [step["slot_mapping"][token] for token in each]
        slots += [-1] * (rank_tokens - len(each))
        gathered += requests_of_rank + [None] * (samples - len(requests_of_rank))
    ends = [end - 1 for end in step["cu_num_tokens"]]
    own_ends = [mine.index(ends[request]) for request in lasts[rank]]
    return {
        "num_tokens": len(mine),
        "num_rows": num_rows,
        "max_query_len": longest[0],
        "max_seq_len": longest[1],
        "num_samples": samples,
        "pcp_ranks": owners,
        "pcp_input_ids": [step["input_ids"][token] for token in mine] + padding,
        "pcp_positions": [step["positions"][token] for token in mine] + padding,
        "pcp_is_padding": [False] * len(mine) + [True] * len(padding),
        "pcp_slot_mapping": slots,
        "pcp_query_start_loc": starts,
        "pcp_seq_lens": lengths,
        "pcp_num_computed_tokens": computed,
        "pcp_table_rows": requests,
        "pcp_logits_indices": own_ends + [0] * (samples - len(own_ends)),
        "pcp_gathered_rows": [gathered.index(request) for request in range(len(ends))],
    }
