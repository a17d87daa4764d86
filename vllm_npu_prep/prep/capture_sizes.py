"""The sizes for which graphs are captured."""

from collections.abc import Iterable


def largest_decode(max_num_seqs: int, decode_query_len: int, max_num_batched_tokens: int) -> int:
    """Tokens of the largest uniform decode step, for which a graph must exist.

    Otherwise that step silently runs eagerly or with much padding (vllm-project/vllm-ascend 16049).
    """
    return decode_query_len * min(max_num_seqs, max_num_batched_tokens // decode_query_len)


def thin_sizes(sizes: Iterable[int], limit: int, keep: Iterable[int]) -> list[int]:
    """Keep at most `limit` of the sizes, spread evenly.

    Parameters
    ----------
    sizes
        In tokens.
    limit
        Most sizes that may be left; at least one is.
    keep
        Sizes to keep, the first ones if there are more than `limit`. The largest of `sizes` always
        stays.

    Returns
    -------
    list of int
        Ascending.
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
