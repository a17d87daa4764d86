"""Recurrent states: where the state of each request is, and whether it holds anything yet.

Layers with linear attention (gated delta nets) keep one *recurrent state* for each request instead
of K and V for each token. A state is a block of the KV cache: a KV-cache group with states has a
block table like any other group, of which a step reads one entry for each request. Its layers write
no slots.

A block may hold what another request left there. So a request's first tokens begin with an empty
state, whatever the block holds: `has_initial_state` tells that, and nothing has to be cleared.

The batch is split as vLLM's ``GDNAttentionMetadataBuilder`` splits it: leading requests of one
token are *decodes*, which update their state token by token; the others are *prefills*, which are
computed in chunks. vLLM also counts a prompt's first chunk of one token as a prefill. Here both
halves ask `has_initial_state`, so that a full graph of decodes may contain such a chunk.

With speculation a decode has up to ``1 + num_drafts`` tokens, and the tokens after a rejected draft
don't count. So a request has that many blocks: the state after the ``i``-th token of a decode is
written to its ``i``-th block, and the state after a prefill to the first one. The next step reads
the state after the last token that counts, which is in block ``num_accepted_tokens - 1``.

With the prefix cache, these are the block of the decode's first token and the blocks behind it in
the row. The state at the end of a block belongs into that block, where other requests look for it.
So a token that ends a block changes places with the first token of its step (`state_column`). The
place of a state follows from the beginning of its step and from its token alone. Therefore nothing
is copied after a step, when nobody knows yet which tokens were accepted.
"""

from dataclasses import dataclass

from vllm_npu_prep.prep.arrays import NULL_BLOCK_ID, PAD_SLOT_ID
from vllm_npu_prep.prep.compiled import compiled, inlined
from vllm_npu_prep.prep.latent_split import split_decodes


@dataclass(frozen=True)
class RecurrentGroups:
    """The KV-cache groups of an engine that hold recurrent states.

    Attributes
    ----------
    num_drafts
        The most drafts of a request, each of which has a state of its own; 0 in an engine without
        speculation.
    """

    groups: tuple[int, ...]  # the indices of these groups
    decode_threshold: int = 1  # the most tokens of a decode
    num_drafts: int = 0

    def __post_init__(self) -> None:
        if self.decode_threshold < 1:
            raise ValueError(f"decodes of {self.decode_threshold} tokens: there is at least one")
        if self.num_drafts and self.decode_threshold != 1 + self.num_drafts:
            raise ValueError(
                f"decodes of {self.decode_threshold} tokens, drafts included, where a step "
                f"drafts {self.num_drafts}"
            )

    def __bool__(self) -> bool:
        return len(self.groups) > 0


NO_RECURRENT_GROUPS = RecurrentGroups(())
"""The groups of an engine without recurrent states, which are false."""


@dataclass(frozen=True)
class RecurrentStep:
    """How a step is split for layers with recurrent states, without padding.

    Attributes
    ----------
    num_decodes, num_decode_tokens
        The number of leading requests that are decodes, and of their tokens.
    num_prefills
        The number of requests after them.
    """

    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 0


NO_RECURRENT_STEP = RecurrentStep()


@compiled
def state_column(
    start,  # the position of the decode's first token (`first_kept`)
    token,  # the index of the token in the decode, from 0
    block_size,  # the number of a request's tokens that share a state; it is more than `num_drafts`
    num_drafts,  # the most drafts of a request
):
    """Return the column of a row in whose block the state after a token of a decode is."""
    column = start // block_size
    ends = block_size - 1 - start % block_size  # the token that ends the block
    if ends <= num_drafts:
        if token == ends:
            return column
        if token == 0:
            return column + ends
    return column + token


@compiled
def first_kept(num_computed, seq_len, keeps_each):
    """Return the position of a request's first token after which it keeps its state.

    A prefill keeps the state of its last token only, like a decode that begins with this token.

    Parameters
    ----------
    num_computed, seq_len
        The number of the request's tokens before and after the step.
    keeps_each
        Whether the state after each token is kept: with speculation, that of a decode.
    """
    return num_computed if keeps_each else seq_len - 1


@compiled
def read_column(num_computed, kept, block_size, num_drafts):
    """Return the column of the state that a request reads: that after its last token that counts.

    Parameters
    ----------
    num_computed
        The number of the request's computed tokens, at least 1.
    kept
        How many tokens of its last step count, at least 1; 1 without speculation.
    block_size, num_drafts
        See `state_column`.
    """
    return state_column(num_computed - kept, kept - 1, block_size, num_drafts)


@inlined
def find_recurrent_states(
    t, out, num_reqs, decode_threshold, num_drafts, num_draft_tokens, kept_tokens
):
    """Find the recurrent state of each request, and where prefills begin.

    The state after a token is in the block of that token. This is the only block of a row, unless
    the prefix cache keeps a state for every `block_sizes` tokens. Then a request that enters a
    block reads its state from the block before, and leaves it there for others.

    Parameters
    ----------
    t, out
        The runner's tables and the step's arrays, as `prep.fused_pass.fill_step` has them; what
        `fill_step` writes is read, and the arrays of recurrent states are written.
    num_reqs, decode_threshold, num_drafts
        The number of requests, and the sizes of `RecurrentGroups`.
    num_draft_tokens, kept_tokens
        int32 ``[num_reqs or more]``; `kept_tokens` is `StepBatch.num_accepted_tokens`, which is
        read with drafts only.

    Returns
    -------
    tuple of int
        The sizes of `RecurrentStep`.

    Raises
    ------
    ValueError
        If a request is longer than its row of a block table, has accepted more tokens than a step
        can have, or has drafts and is no decode; or if a decode can be longer than a block.
    """
    num_decodes = split_decodes(out, num_reqs, decode_threshold)
    num_decode_tokens = out.query_start_loc[num_decodes]
    for req in range(num_reqs):
        out.has_initial_state[req] = out.num_computed_tokens[req] > 0
    if num_drafts > 0:
        for req in range(num_reqs):
            kept = kept_tokens[req] if out.num_computed_tokens[req] > 0 else 1
            if kept < 1 or kept > 1 + num_drafts or kept > max(out.num_computed_tokens[req], 1):
                raise ValueError("more accepted tokens than a step has, or none")
            out.num_accepted_tokens[req] = kept
            if num_draft_tokens[req] > 0 and req >= num_decodes:
                raise ValueError("drafts of a request after the decodes, which keeps one state")
    for index in range(t.state_groups.shape[0]):
        group = t.state_groups[index]
        size, width = t.block_sizes[group], t.max_num_blocks[group]
        if size <= num_drafts:
            raise ValueError("a block of states is shorter than a decode")
        for req in range(num_reqs):
            row = t.first_state_entries[index] + t.request_rows[req] * width
            start, end = out.query_start_loc[req], out.query_start_loc[req + 1]
            speculates = num_drafts > 0 and req < num_decodes
            states = end - start if speculates else 1
            first = first_kept(out.num_computed_tokens[req], out.seq_lens[req], speculates)
            if first // size + states > width:
                raise ValueError("a sequence is longer than its row of the block table")
            column = state_column(first, 0, size, num_drafts)
            if column >= width:
                raise ValueError("a state is past its row of the block table")
            out.state_indices[index, req] = t.block_table_flat[row + column]
            if num_drafts > 0:
                for token in range(start, end):
                    block = NULL_BLOCK_ID
                    if speculates:
                        column = state_column(first, token - start, size, num_drafts)
                        block = t.block_table_flat[row + column]
                    out.token_state_indices[index, token] = block
            out.initial_state_indices[index, req] = NULL_BLOCK_ID
            if out.num_computed_tokens[req] > 0:
                kept = out.num_accepted_tokens[req] if num_drafts > 0 else 1
                column = read_column(out.num_computed_tokens[req], kept, size, num_drafts)
                if column >= width:
                    raise ValueError("a state is past its row of the block table")
                out.initial_state_indices[index, req] = t.block_table_flat[row + column]
        none = out.slot_mapping[group]
        for token in range(none.shape[0]):
            none[token] = PAD_SLOT_ID
    return num_decodes, num_decode_tokens, num_reqs - num_decodes
