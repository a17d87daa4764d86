"""The sizes for which graphs are captured: the largest one, those whose padding fits, and fewer."""

from collections.abc import Iterable


def largest_decode(max_num_seqs: int, decode_query_len: int, max_num_batched_tokens: int) -> int:
    """Return the tokens of the largest uniform decode step, for which a graph must exist.

    Without one, this step silently runs eagerly or with much padding (vllm-project/vllm-ascend
    16049).
    """
    return decode_query_len * min(max_num_seqs, max_num_batched_tokens // decode_query_len)


def fitting_sizes(sizes: Iterable[int], max_num_seqs: int, max_model_len: int) -> list[int]:
    """Return the sizes of graphs for mixed batches whose padding fits the padding requests.

    They are in ascending order. A batch replays the smallest size that holds it. It pads the most,
    in the fewest rows, with one token more than the next smaller size, or with a request in every
    row, whichever has more tokens: then one padding request is left, and a row of its block table
    holds ``max_model_len`` tokens.
    """
    kept: list[int] = []
    for size in sorted(set(sizes)):
        fewest_tokens = max(kept[-1] + 1 if kept else 1, min(size, max_num_seqs))
        if size - fewest_tokens <= max_model_len:
            kept.append(size)
    return kept


def thin_sizes(sizes: Iterable[int], limit: int, keep: Iterable[int]) -> list[int]:
    """Keep at most `limit` of the sizes, but at least one, spread evenly and in ascending order.

    The largest of `sizes` always stays, and then as many of `keep`, in their order, as `limit`
    allows.
    """
    ascending = sorted(set(sizes))
    limit = max(1, limit)
    if len(ascending) <= limit:
        return ascending
    wanted = [ascending[-1], *(size for size in keep if size in ascending)]
    kept = set(list(dict.fromkeys(wanted))[:limit])
    others = [size for size in ascending if size not in kept]
    room = limit - len(kept)
    kept.update(others[(2 * index + 1) * len(others) // (2 * room)] for index in range(room))
    return sorted(kept)
