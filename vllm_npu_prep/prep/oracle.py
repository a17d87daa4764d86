"""The same step in plain scalar loops: the reference for tests, for `check` and for readers.

The oracle shares no arithmetic with `fused_pass`, `state`, `mask` or `padding`: each rule is
written down a second time, token by token, as the reference documents tell it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_npu_prep.prep.oracle_dcp import place_on_its_rank, rank_of, share_out


@dataclass(frozen=True)
class OracleRequest:
    """One scheduled request in plain Python values."""

    num_computed_tokens: int
    num_scheduled_tokens: int
    num_prompt_tokens: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    num_draft_tokens: int = 0
    draft_token_ids: Sequence[int] = field(default_factory=tuple)
    # For a model with M-RoPE: the positions of the prompt's tokens in each dimension, empty if they
    # count up from 0; and the number that is added to positions after the prompt
    mrope_positions: Sequence[Sequence[int]] = ()
    mrope_position_delta: int = 0
    num_accepted_tokens: int = 1  # of its last step, for recurrent states and speculation


@dataclass(frozen=True)
class OracleGraphs:
    """The graphs that an engine captured, in plain Python values; modes have vLLM's names."""

    mode: str
    capture_sizes: Sequence[int]
    max_num_seqs: int
    decode_query_len: int = 1


def oracle_step(
    requests: Sequence[OracleRequest],  # the batch in order
    *,
    block_size: int,
    max_model_len: int,
    capture_sizes: Sequence[int] | None = None,
    graphs: OracleGraphs | None = None,
    mask: str = "dense",  # "dense" or "compressed"
    sliding_window: int | None = None,  # in tokens; None without one
    chunked_prefill: bool = True,  # whether the scheduler may split prompts
    speculation: bool = False,
    mrope_dims: int = 0,
    dcp: tuple[int, int, int] | None = None,
) -> dict[str, Any]:
    """Prepare a step of one KV-cache group.

    Parameters
    ----------
    block_size, max_model_len
        In tokens.
    capture_sizes
        The sizes of full graphs for a batch outside an engine; None adds no padded keys.
    graphs
        What an engine captured: how it would run and pad this batch. This adds the padded keys and
        ``runtime_mode``.
    speculation
        This adds what rejection sampling reads: drafts, and which logits verify them.
    mrope_dims
        The dimensions of M-RoPE positions; this adds ``mrope_positions`` unless it is 0.
    dcp
        With decode context parallelism: the number of ranks, the rank of the step, and how many
        neighbouring tokens one rank keeps; `block_size` counts slots then. This adds
        ``dcp_local_seq_lens``, ``dcp_local_context_lens`` and ``dcp_ranks``, the rank that keeps
        each token.

    Returns
    -------
    dict
        Every variable of the step as lists and integers, by the names of the reference documents;
        ``attn_mask`` is a list of rows of 0 and 1 (1: masked), ``"compressed"`` or None.
    """
    out: dict[str, Any] = {
        name: []
        for name in (
            "req_indices",
            "query_pos",
            "positions",
            "token_indices",
            "input_ids",
            "block_table_indices",
            "block_numbers",
            "block_offsets",
            "slot_mapping",
            "query_lens",
            "cu_num_tokens",
            "seq_lens",
            "num_computed_tokens",
            "logits_indices",
            "block_table",
        )
    }
    out["query_start_loc"] = [0]
    blocks_per_req = 0
    ranks = 1 if dcp is None else dcp[0]
    while blocks_per_req * block_size * ranks < max_model_len:
        blocks_per_req += 1

    total = 0
    for index, request in enumerate(requests):
        row = list(request.block_ids) + [0] * (blocks_per_req - len(request.block_ids))
        out["block_table"].append(row)
        sequence_end = request.num_computed_tokens + request.num_scheduled_tokens
        first_draft = sequence_end - request.num_draft_tokens
        for offset in range(request.num_scheduled_tokens):
            position = request.num_computed_tokens + offset
            if position >= first_draft:
                token = request.draft_token_ids[position - first_draft]
            else:
                token = request.token_ids[position]
            column, offset_in_block = position // block_size, position % block_size
            if dcp is not None:
                column, offset_in_block = place_on_its_rank(position, block_size, dcp)
            block = row[column]
            out["req_indices"].append(index)
            out["query_pos"].append(offset)
            out["positions"].append(position)
            out["token_indices"].append(index * max_model_len + position)
            out["input_ids"].append(max(token, 0))  # -1: a draft that is not known yet
            out["block_table_indices"].append(index * blocks_per_req + column)
            out["block_numbers"].append(block)
            out["block_offsets"].append(offset_in_block)
            is_mine = dcp is None or rank_of(position, dcp) == dcp[1]
            out["slot_mapping"].append(block * block_size + offset_in_block if is_mine else -1)
            if position >= first_draft - 1:
                out["logits_indices"].append(total)
            total += 1
        out["query_lens"].append(request.num_scheduled_tokens)
        out["cu_num_tokens"].append(total)
        out["query_start_loc"].append(total)
        out["seq_lens"].append(sequence_end)
        out["num_computed_tokens"].append(request.num_computed_tokens)

    out["total_num_scheduled_tokens"] = total
    out["num_reqs"] = len(requests)
    out["max_query_len"] = max(out["query_lens"])
    out["max_seq_len"] = max(out["seq_lens"])
    out["attn_state"] = _state(requests, chunked_prefill)
    out["num_input_tokens"] = total
    if capture_sizes is not None:
        _pad(out, requests, capture_sizes, max_model_len)
    if graphs is not None:
        _replay(out, requests, graphs, max_model_len)
    if speculation:
        _verify(out, requests)
    if dcp is not None:
        share_out(out, dcp)
    if mrope_dims:
        out["mrope_positions"] = [_mrope(out, requests, dim) for dim in range(mrope_dims)]
    out["attn_mask"] = _mask(out, mask, sliding_window)
    return out


def _mrope(out: dict[str, Any], requests: Sequence[OracleRequest], dim: int) -> list[int]:
    """Return one dimension of the positions: the model's in the prompt, counted after it."""
    row = []
    for index, position in zip(out["req_indices"], out["positions"]):
        request = requests[index]
        if request.mrope_positions and position < len(request.mrope_positions[dim]):
            row.append(request.mrope_positions[dim][position])
        else:
            row.append(position + request.mrope_position_delta)
    return row


def _verify(out: dict[str, Any], requests: Sequence[OracleRequest]) -> None:
    """Add one row of logits for each draft, which verifies it, and one row after them."""
    targets, drafts, bonus, cu_drafts, cu_samples, backups = [], [], [], [], [], []
    row = 0
    for request in requests:
        for draft in request.draft_token_ids:
            targets.append(row)
            drafts.append(draft)
            row += 1
        bonus.append(row)
        row += 1
        cu_drafts.append(len(drafts))
        cu_samples.append(row)
        sequence_end = request.num_computed_tokens + request.num_scheduled_tokens
        if sequence_end < len(request.token_ids):
            backups.append(request.token_ids[sequence_end])
        else:
            backups.append(request.token_ids[-1])
    out["target_logits_indices"] = targets
    out["draft_token_ids"] = drafts
    out["bonus_logits_indices"] = bonus
    out["cu_num_draft_tokens"] = cu_drafts
    out["cu_num_sampled_tokens"] = cu_samples
    out["backup_next_token_ids"] = backups


def _state(requests: Sequence[OracleRequest], chunked_prefill: bool) -> str:
    fresh = drafted = verify = single = prompt = 0
    for request in requests:
        fresh += request.num_computed_tokens == 0
        drafted += request.num_draft_tokens > 0
        verify += request.num_scheduled_tokens - request.num_draft_tokens == 1
        single += request.num_scheduled_tokens == 1
        prompt += request.num_computed_tokens < request.num_prompt_tokens
    everyone = len(requests)
    if fresh == everyone:
        return "PrefillNoCache"
    if drafted and verify == everyone:
        return "SpecDecoding"
    if single == everyone:
        return "DecodeOnly"
    if prompt == everyone and not chunked_prefill:
        return "PrefillCacheHit"
    return "ChunkedPrefill"


def _pad(
    out: dict[str, Any],
    requests: Sequence[OracleRequest],
    capture_sizes: Sequence[int],
    max_model_len: int,
) -> None:
    total = out["total_num_scheduled_tokens"]
    lengths = {request.num_scheduled_tokens for request in requests}
    decodes = all(r.num_scheduled_tokens - r.num_draft_tokens == 1 for r in requests)
    decode_len = lengths.pop() if len(lengths) == 1 and decodes else 0

    size, step = total, 0
    fitting = sorted(s for s in capture_sizes if s >= total)
    whole = [s for s in fitting if decode_len and s % decode_len == 0]
    if whole:
        size, step = whole[0], decode_len
    elif fitting:
        size = fitting[0]

    query_start_loc = list(out["query_start_loc"])
    while query_start_loc[-1] < size:
        query_start_loc.append(min(query_start_loc[-1] + (step or max_model_len), size))
    _write_padded(out, size, query_start_loc)


def _replay(
    out: dict[str, Any],
    requests: Sequence[OracleRequest],
    graphs: OracleGraphs,
    max_model_len: int,
) -> None:
    """Decide which graph the batch replays, if any, and what this graph sees."""
    total, size = out["total_num_scheduled_tokens"], 0
    for capture_size in sorted(graphs.capture_sizes):
        if capture_size >= total:
            size = capture_size
            break
    decode_len = graphs.decode_query_len
    decodes = all(request.num_scheduled_tokens == decode_len for request in requests)
    decode_mode = {"FULL_DECODE_ONLY": "FULL", "FULL_AND_PIECEWISE": "FULL"}.get(
        graphs.mode, graphs.mode
    )
    mixed_mode = {"FULL_DECODE_ONLY": "NONE", "FULL_AND_PIECEWISE": "PIECEWISE"}.get(
        graphs.mode, graphs.mode
    )
    mode = mixed_mode
    if decodes and decode_mode != mixed_mode and size <= graphs.max_num_seqs * decode_len:
        mode = decode_mode
    if size == 0:
        mode, size = "NONE", total
    if mode == "NONE":
        size = total

    query_start_loc = list(out["query_start_loc"])
    if mode == "FULL" and mixed_mode == "FULL":
        out["attn_state"] = "ChunkedPrefill"
        while len(query_start_loc) < 1 + min(size, graphs.max_num_seqs) + 1:
            query_start_loc.append(min(query_start_loc[-1] + max_model_len, size))
    elif mode == "FULL":
        out["attn_state"] = "DecodeOnly" if decode_len == 1 else "SpecDecoding"
        while query_start_loc[-1] < size:
            query_start_loc.append(query_start_loc[-1] + decode_len)
    out["runtime_mode"] = mode
    _write_padded(out, size, query_start_loc)


def _write_padded(out: dict[str, Any], size: int, query_start_loc: list[int]) -> None:
    extra = size - out["total_num_scheduled_tokens"]
    rows = len(query_start_loc) - 1
    out["num_input_tokens"] = size
    out["num_reqs_padded"] = rows
    out["input_ids_padded"] = out["input_ids"] + [0] * extra
    out["positions_padded"] = out["positions"] + [0] * extra
    out["slot_mapping_padded"] = out["slot_mapping"] + [-1] * extra
    out["query_start_loc_padded"] = query_start_loc
    out["seq_lens_padded"] = list(out["seq_lens"])
    for row in range(len(out["seq_lens"]), rows):  # as many keys as tokens
        out["seq_lens_padded"].append(query_start_loc[row + 1] - query_start_loc[row])


def _mask(out: dict[str, Any], form: str, sliding_window: int | None) -> Any:
    if out["attn_state"] == "DecodeOnly" and sliding_window is None:
        return None
    if form == "compressed":
        return "compressed"

    def row(position: int) -> list[int]:
        cells = []
        for column in range(out["max_seq_len"]):
            visible = column <= position
            if sliding_window is not None and position - column >= sliding_window:
                visible = False
            cells.append(0 if visible else 1)
        return cells

    if out["attn_state"] == "PrefillNoCache":
        return [row(position) for position in range(out["max_seq_len"])]
    rows = [row(position) for position in out["positions"]]
    padding = out["num_input_tokens"] - out["total_num_scheduled_tokens"]
    return rows + [[0] * out["max_seq_len"] for _ in range(padding)]


def oracle_local_requests(
    requests: Sequence[OracleRequest], *, attention_chunk_size: int, block_size: int
) -> dict[str, list[Any]]:
    """Return the virtual requests of chunked local attention, without padding.

    Sizes are in tokens, and chunks are whole blocks.

    Returns
    -------
    dict
        ``query_start_loc``, ``seq_lens``, ``num_computed_tokens``, ``block_table`` (0 past the
        blocks that a request owns) and, for each token of the step, ``visible``: the positions that
        it sees.
    """
    starts, lengths, computed, tables, visible = [0], [], [], [], []
    for request in requests:
        chunk = None
        for offset in range(request.num_scheduled_tokens):
            position = request.num_computed_tokens + offset
            first = position
            while first % attention_chunk_size:
                first -= 1
            visible.append(list(range(first, position + 1)))
            if first != chunk:
                chunk = first
                starts.append(starts[-1])
                lengths.append(0)
                computed.append(position - first)
                row = []
                for start in range(first, first + attention_chunk_size, block_size):
                    owned = start // block_size < len(request.block_ids)
                    row.append(request.block_ids[start // block_size] if owned else 0)
                tables.append(row)
            starts[-1] += 1
            lengths[-1] = position - first + 1
    return {
        "query_start_loc": starts,
        "seq_lens": lengths,
        "num_computed_tokens": computed,
        "block_table": tables,
        "visible": visible,
    }


def oracle_latent_step(
    requests: Sequence[OracleRequest],
    *,
    decode_threshold: int,
    workspace_tokens: int,
    block_size: int,
) -> dict[str, Any]:
    """Return the decodes, prefills and context chunks of latent attention, without padding.

    Parameters
    ----------
    decode_threshold
        The most tokens of a decode.
    workspace_tokens, block_size
        The most rows of a chunk, and of a block; contexts are cut between blocks.

    Returns
    -------
    dict
        ``num_decodes``, ``num_decode_tokens``, ``num_prefills``, ``num_pieces``, ``num_chunks``,
        ``prefill_query_start_loc``, and by the names of the table of arrays, for each piece of a
        context its request, first position, length and chunk.
    """
    prefills = list(range(len(requests)))
    while prefills and requests[prefills[0]].num_scheduled_tokens <= decode_threshold:
        prefills.pop(0)
    num_decodes = len(requests) - len(prefills)
    starts = [0]
    for index in prefills:
        starts.append(starts[-1] + requests[index].num_scheduled_tokens)

    chunks: list[list[tuple[int, int, int]]] = []
    room = 0  # positions of the last chunk that are free
    for index in prefills:
        left = list(range(requests[index].num_computed_tokens))
        if not left:
            room = 0
        while left:
            taken = left[:room]
            while len(taken) < len(left) and len(taken) % block_size:
                taken.pop()
            if not taken:
                chunks.append([])
                room = workspace_tokens
                continue
            chunks[-1].append((index, taken[0], len(taken)))
            left = left[len(taken) :]
            room = 0 if left else room - len(taken)
    return {
        "num_decodes": num_decodes,
        "num_decode_tokens": sum(r.num_scheduled_tokens for r in requests[:num_decodes]),
        "num_prefills": len(prefills),
        "num_pieces": sum(len(chunk) for chunk in chunks),
        "num_chunks": len(chunks),
        "prefill_query_start_loc": starts,
        "context_piece_reqs": [piece[0] for chunk in chunks for piece in chunk],
        "context_piece_starts": [piece[1] for chunk in chunks for piece in chunk],
        "context_piece_lens": [piece[2] for chunk in chunks for piece in chunk],
        "context_piece_chunks": [i for i, chunk in enumerate(chunks) for _ in chunk],
    }


def _state_blocks(
    request: OracleRequest, start: int, block_size: int, num_drafts: int
) -> list[int]:
    """Return the blocks of the states after a token and as many drafts, token by token."""
    columns = [start // block_size]
    while len(columns) <= num_drafts:
        columns.append(columns[-1] + 1)
    for token in range(len(columns)):
        if (start + token + 1) % block_size == 0:  # the prefix cache looks for this state there
            columns[0], columns[token] = columns[token], columns[0]
            break
    return [request.block_ids[c] if c < len(request.block_ids) else 0 for c in columns]


def oracle_state_step(
    # The batch in order, with the blocks of requests in the group
    requests: Sequence[OracleRequest],
    *,
    decode_threshold: int,  # the most tokens of a decode
    block_size: int,  # the number of a request's tokens that share a state
    # The most drafts of a request; unless it is 0, each token of a decode has a state
    num_drafts: int = 0,
) -> dict[str, Any]:
    """Return where the recurrent states of a group are, and how the step is split.

    Padding is left out.

    Returns
    -------
    dict
        ``num_decodes``, ``num_decode_tokens``, ``num_prefills``, ``prefill_query_start_loc``,
        ``has_initial_state``, ``initial_state_indices`` (0 for requests that begin),
        ``state_indices``, ``token_state_indices`` and ``num_accepted_tokens``; the last two are
        empty without drafts.
    """
    prefills = list(requests)
    while prefills and prefills[0].num_scheduled_tokens <= decode_threshold:
        prefills.pop(0)
    decodes = requests[: len(requests) - len(prefills)]
    starts, reads, writes, begun = [0], [], [], []
    of_tokens, kept = [], []
    for request in prefills:
        starts.append(starts[-1] + request.num_scheduled_tokens)
    for row, request in enumerate(requests):
        state, accepted = 0, 1
        if request.num_computed_tokens and num_drafts:
            accepted = request.num_accepted_tokens
        if request.num_computed_tokens:
            began = request.num_computed_tokens - accepted
            state = _state_blocks(request, began, block_size, num_drafts)[accepted - 1]
        begun.append(request.num_computed_tokens != 0)
        reads.append(state)
        kept.append(accepted)
        begins = request.num_computed_tokens
        has_states = row < len(decodes) and num_drafts > 0
        if not has_states:
            begins += request.num_scheduled_tokens - 1  # the last token's is the only state kept
        blocks = _state_blocks(request, begins, block_size, num_drafts)
        writes.append(blocks[0])
        for offset in range(request.num_scheduled_tokens):
            of_tokens.append(blocks[offset] if has_states else 0)
    return {
        "num_decodes": len(decodes),
        "num_decode_tokens": sum(request.num_scheduled_tokens for request in decodes),
        "num_prefills": len(prefills),
        "prefill_query_start_loc": starts,
        "has_initial_state": begun,
        "initial_state_indices": reads,
        "state_indices": writes,
        "token_state_indices": of_tokens if num_drafts else [],
        "num_accepted_tokens": kept if num_drafts else [],
    }
