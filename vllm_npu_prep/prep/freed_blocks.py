"""Which blocks of a request nobody reads any more, so that vLLM may have freed them."""


def first_needed(
    position: int,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    holds_states: bool = False,
) -> int:
    """Return the first position that a position's token reads in a KV-cache group.

    Blocks wholly before it may be freed; a row of a block table may have the null block there.
    """
    if holds_states:
        return max(0, position - 1)  # the state after the token before it
    if sliding_window is not None:
        return max(0, position - sliding_window + 1)
    if attention_chunk_size is not None:
        return position // attention_chunk_size * attention_chunk_size
    return 0
