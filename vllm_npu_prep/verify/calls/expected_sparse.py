"""What both operators of sparse attention have to give, by their arguments."""

import math
from collections.abc import Mapping

import torch

from vllm_npu_prep.verify import formulas
from vllm_npu_prep.verify.calls.expected_part import Arguments, Expected, Formula, some_rows

SCORE_TOLERANCE = 1e-3
"""Scores are computed in float32, of numbers that are not rounded before."""

OUTPUT_TOLERANCE = 0.03
"""Probabilities are rounded between two products."""


def _some_tokens(a: Arguments, layout: str, lengths: str) -> list[tuple[int, int, int]]:
    """Return some tokens over blocks of a cache: the row, the request, and how many keys it sees.

    The names are those of two arguments.
    """
    if a.get("layout_query") != "TND" or a.get(layout) != "PA_BSND":
        return []
    found, begin = [], 0
    for request, end in enumerate(a["actual_seq_lengths_query"].tolist()):
        length = int(a[lengths][request])
        for row in range(begin, end):
            seen = length if a.get("sparse_mode", 3) == 0 else length - (end - row) + 1
            found.append((row, request, max(seen, 0)))
        begin = end
    return [found[index] for index in some_rows(len(found)).tolist()]


def _rows_of(a: Arguments, plane: str, request: int, count: int) -> torch.Tensor:
    """Return the first rows of a request in a plane, one after the other."""
    blocks = a["block_table"][request, : -(-count // a[plane].shape[1])].long()
    return a[plane][blocks].flatten(0, 2)[:count]


def _choice(a: Arguments) -> list[Expected]:
    """Expect the best scores: of equal ones, any may be chosen."""
    tokens = _some_tokens(a, "layout_key", "actual_seq_lengths_key")
    if not tokens:
        return []
    count, most = a.get("sparse_count", 2048), max(seen for _, _, seen in tokens)
    # The last column is what an entry of -1 stands for, and has the score of no key
    scores = torch.full((len(tokens), 1, most + 1), -math.inf, dtype=torch.float64)
    for place, (row, request, seen) in enumerate(tokens):
        own = a["query"][row, None], a["weights"][row, None]
        keys = _rows_of(a, "key", request, seen)
        scores[place, 0, :seen] = formulas.index_scores(*own, keys)[0]
    best = scores.sort(-1, descending=True).values[..., :count]
    best = torch.nn.functional.pad(best, (0, count - best.shape[-1]), value=-math.inf)
    rows = torch.tensor([row for row, _, _ in tokens])
    return [Expected(0, best, rows, SCORE_TOLERANCE, places_in=scores)]


def _attention(a: Arguments) -> list[Expected]:
    tokens = _some_tokens(a, "layout_kv", "actual_seq_lengths_kv")
    if not tokens or a.get("sparse_block_size", 1) != 1:
        return []
    outputs = []
    for row, request, seen in tokens:
        latent, rope = (_rows_of(a, plane, request, seen)[:, None] for plane in ("key", "key_rope"))
        chosen = a["sparse_indices"][row, 0].long()
        is_seen = torch.zeros(1, seen, dtype=torch.bool)
        is_seen[0, chosen[(chosen >= 0) & (chosen < seen)]] = True
        query = torch.cat((a["query"][row, None], a["query_rope"][row, None]), -1)
        keys = torch.cat((latent, rope), -1)
        outputs.append(formulas.attention(query, keys, latent, a["scale_value"], is_seen)[0])
    rows = torch.tensor([row for row, _, _ in tokens])
    return [Expected(0, torch.cat(outputs), rows, OUTPUT_TOLERANCE)]


FORMULAS: Mapping[str, Formula] = {
    "npu_lightning_indexer": _choice,
    "npu_sparse_flash_attention": _attention,
}
"""By operators, without their overloads: a function of the arguments on the host, by name."""
