"""The check ``{"npu_prep": {"check": "cheap"}}``: one compiled pass over a step's host arrays.

The pass is `vllm_npu_prep.prep.checks`; this module describes the faults that it finds.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_npu_prep.observe.violation import StepCheckError, given_allowed
from vllm_npu_prep.prep.checks import HOLDS, Fault, Rule, find_fault
from vllm_npu_prep.prep.states import state_column
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_npu_prep.prep.batch import PreparedStep


class StepCheck:
    """The cheap check of a runner's steps.

    Parameters
    ----------
    vocab_size
        Token ids are below it.
    num_slots
        Slots of each KV-cache group.

    Attributes
    ----------
    limits, limits_with_embeds
        Arguments of `find_fault` for steps of token ids and for steps with embeddings: int64, the
        end of the allowed token ids and then `num_slots`.
    limits_in_pass
        The limits with which steps of token ids are checked as they are written
        (`StepBatch.check_limits`).
    """

    def __init__(self, vocab_size: int, num_slots: list[int]) -> None:
        self.limits = np.array([vocab_size, *num_slots], np.int64)
        self.limits_with_embeds = self.limits.copy()
        self.limits_with_embeds[0] = 1 << 31
        self.limits_in_pass = self.limits

    def follow(self, scheduler_output: "SchedulerOutput") -> None:
        """Learn what the scheduler decided; the cheap check has no use for it."""

    def verify(self, runner: Any, scheduler_output: "SchedulerOutput") -> None:
        """Check the step that a runner has just prepared.

        Raises
        ------
        StepCheckError
            Names the rule, the request, the token, what was given and what is allowed.
        """
        step = runner.in_flight.step
        if step.rule == HOLDS and not step.shape.local and not step.shape.states:
            return  # virtual requests and states are written after that pass
        limits = self.limits_with_embeds if step.batch.takes_embeds else self.limits
        fault = find_fault(step, limits)
        if fault is not None:
            req_ids = runner.input_batch.req_ids if step.num_reqs else []  # a dummy run has none
            raise explain_fault(step, limits, fault, req_ids)


def explain_fault(
    step: "PreparedStep", limits: np.ndarray, fault: Fault, req_ids: list[str]
) -> StepCheckError:
    """Describe a fault as an error.

    Parameters
    ----------
    step, limits
        The arguments of `find_fault`.
    fault
        Its result.
    req_ids
        Ids of the batch's requests, in order.
    """
    rule, req, token, group = fault
    arrays, tables = step.arrays, step.batch.tables
    if req < 0 <= token < step.total_num_scheduled_tokens:
        req = int(np.searchsorted(arrays.query_start_loc[: step.num_reqs + 1], token, "right")) - 1
    is_local = Rule.LOCAL_QUERY_LENS <= rule <= Rule.LOCAL_ENDS_AT_INPUT_TOKENS
    starts = arrays.chunk_local_query_start_loc if is_local else arrays.query_start_loc
    given: Any
    allowed: Any
    name, text = RULES[rule]
    if rule == Rule.STARTS_AT_ZERO:
        given, allowed = starts[0], 0
    elif rule == Rule.QUERY_LENS:
        given = f"{starts[req]} to {starts[req + 1]}"
        allowed = f"{step.query_lens[req]} scheduled tokens of {step.num_input_tokens}"
    elif rule in (Rule.ENDS_AT_TOKENS, Rule.LOCAL_ENDS_AT_TOKENS):
        given = starts[step.num_reqs] if rule == Rule.ENDS_AT_TOKENS else starts[req + 1]
        allowed = step.total_num_scheduled_tokens
    elif rule == Rule.SEQ_LENS:
        given = f"{arrays.seq_lens[req]} of {arrays.num_computed_tokens[req]} computed"
        computed = max(0, int(tables.num_computed_tokens[step.slots[req]]))
        allowed = f"{computed + step.query_lens[req]} of {computed} computed"
    elif rule == Rule.MODEL_LEN:
        given, allowed = arrays.seq_lens[req], f"up to max_model_len {tables.max_model_len}"
    elif rule == Rule.BLOCKS:
        owned = int(tables.num_blocks[group, step.slots[req]])
        given = arrays.seq_lens[req]
        allowed = f"up to {owned * tables.tokens_per_block(group)} in its {counted(owned, 'block')}"
    elif rule == Rule.POSITIONS:
        given = arrays.positions[token]
        allowed = int(arrays.num_computed_tokens[req]) + token - int(starts[req])
    elif rule == Rule.VOCABULARY:
        given, allowed = arrays.input_ids[token], f"0 to {limits[0] - 1}"
    elif rule == Rule.SLOTS:
        given = arrays.slot_mapping[group, token]
        allowed = f"{tables.block_sizes[group]} to {limits[1 + group] - 1}"
    elif rule == Rule.LAST_SLOT:
        given = arrays.slot_mapping[group, token]
        block, offset = divmod(int(arrays.seq_lens[req]) - 1, int(tables.block_sizes[group]))
        number = int(tables.block_table(group)[step.slots[req], block])
        allowed = f"{number * int(tables.block_sizes[group]) + offset}, in its block {number}"
    elif rule == Rule.MAX_QUERY_LEN:
        given, allowed = step.max_query_len, step.query_lens.max(initial=0)
    elif rule == Rule.MAX_SEQ_LEN:
        given, allowed = step.max_seq_len, step.seq_lens.max(initial=0)
    elif rule == Rule.LOGITS:
        given = f"token {token} in {step.logits_indices.tolist()}"
        allowed = f"rising, below {step.total_num_scheduled_tokens}"
        token = -1
    elif rule == Rule.PADDING_TOKENS:
        given, allowed = arrays.slot_mapping[group, token], "-1"
    elif rule == Rule.PADDING_REQS:
        given = (
            f"tokens {starts[req]} to {starts[req + 1]}, length {arrays.seq_lens[req]}, "
            f"{arrays.num_computed_tokens[req]} of them computed"
        )
        allowed = (
            f"tokens that rise to {step.num_input_tokens} at most, and a length that is their "
            f"number, up to max_model_len {tables.max_model_len}, 0 of them computed"
        )
    elif rule in (Rule.ENDS_AT_INPUT_TOKENS, Rule.LOCAL_ENDS_AT_INPUT_TOKENS):
        given, allowed = starts[-1], step.num_input_tokens
    elif rule == Rule.LOCAL_QUERY_LENS:
        given = f"{starts[req]} to {starts[req + 1]}"
        allowed = f"rising from 0 to {step.num_input_tokens} at most"
    elif rule == Rule.NO_SLOT:
        given, allowed = arrays.slot_mapping[group, token], "-1"
    elif rule in (Rule.SHARDED_SLOTS, Rule.SHARDED_LENS):
        given, allowed = _shards(step, req, token, group, rule)
    elif rule == Rule.STATE_BEGINS:
        given, computed = bool(arrays.has_initial_state[req]), arrays.num_computed_tokens[req]
        allowed = f"{bool(computed)}, with {counted(int(computed), 'computed token')}"
    elif rule in (Rule.STATE_BLOCKS, Rule.STATE_SHARED, Rule.STATE_PADDING):
        given, allowed = _states(step, req, token, group, rule, req_ids)
    elif rule == Rule.STATE_ACCEPTED:
        given, kept = arrays.num_accepted_tokens[req], int(step.batch.num_accepted_tokens[req])
        allowed = kept if arrays.num_computed_tokens[req] else 1
    else:
        computed = int(arrays.chunk_local_num_computed_tokens[req])
        given = f"{arrays.chunk_local_seq_lens[req]} of {computed} computed"
        allowed = (
            f"{computed + starts[req + 1] - starts[req]} of {computed} computed, up to a chunk of "
            f"{step.shape.local.attention_chunk_size}"
        )
    who = None
    if is_local and req >= 0:
        text = f"{text} (virtual request {req})"
    elif 0 <= req < step.num_reqs:
        who = req_ids[req]
    elif req >= 0:
        text = f"{text} (padding request {req})"
    where: dict[str, Any] = {"request": who, "token": token if token >= 0 else None}
    return given_allowed(name, text, given, allowed, **where, group=group if group >= 0 else None)


def _states(
    step: "PreparedStep", req: int, token: int, group: int, rule: Rule, req_ids: list[str]
) -> tuple[str, str]:
    """Return the blocks of recurrent states that a request was given, and the allowed ones."""
    arrays, tables, states = step.arrays, step.batch.tables, step.shape.states
    if group < 0:  # a padding request breaks a rule that all groups share
        if arrays.has_initial_state[req]:
            return "an initial state", "none"
        return counted(int(arrays.num_accepted_tokens[req]), "accepted token"), "1"
    index, speculates = states.groups.index(group), states.num_drafts > 0
    if rule == Rule.STATE_PADDING and token >= 0:
        return f"block {arrays.token_state_indices[index, token]}", "the null block"
    reads = int(arrays.initial_state_indices[index, req])
    writes = int(arrays.state_indices[index, req])
    if rule == Rule.STATE_PADDING:
        return f"reads block {reads}, writes block {writes}", "the null block"
    if rule == Rule.STATE_SHARED:
        return _shared_state(step, req, index, req_ids), "a block of its own"

    row, size = tables.block_table(group)[step.slots[req]], int(tables.block_sizes[group])
    num_drafts = states.num_drafts

    def named(start: int, token: int) -> str:
        """Name the block of the state after a token, by the request's row of the table."""
        return f"block {row[state_column(start, token, size, num_drafts)]}"

    computed, length = int(arrays.num_computed_tokens[req]), int(arrays.seq_lens[req])
    is_decode = speculates and req < step.states.num_decodes
    if token >= 0:
        after = named(computed, token - int(arrays.query_start_loc[req]))
        given = f"writes block {arrays.token_state_indices[index, token]}"
        return given, f"writes {after}, which is not the null block"
    after = named(computed if is_decode else length - 1, 0)
    if not computed:
        return f"writes block {writes}", f"writes {after}, which is not the null block"
    kept = int(arrays.num_accepted_tokens[req]) if speculates else 1
    before = named(computed - kept, kept - 1)
    given = f"reads block {reads}, writes block {writes}"
    return given, f"reads {before}, writes {after}, and neither is the null block"


def _shared_state(step: "PreparedStep", req: int, index: int, req_ids: list[str]) -> str:
    """Say which recurrent state of a request another one has in this step, too, and who that is."""
    arrays = step.arrays
    num_decodes = step.states.num_decodes if step.shape.states.num_drafts else 0
    written = []
    for each in range(step.num_reqs):
        tokens = slice(*arrays.query_start_loc[each : each + 2].tolist())
        of_tokens = arrays.token_state_indices[index, tokens].tolist() if num_decodes else []
        blocks = of_tokens if each < num_decodes else [int(arrays.state_indices[index, each])]
        written.append(blocks)
    for block in written[req]:
        for other, blocks in enumerate(written):
            if other != req and block in blocks:
                return f"writes block {block}, as request {req_ids[other]} does"
        if written[req].count(block) > 1:
            return f"writes block {block} after two of its tokens"
    reads = int(arrays.initial_state_indices[index, req])
    writer = next(other for other, blocks in enumerate(written) if other != req and reads in blocks)
    return f"reads block {reads}, which request {req_ids[writer]} writes"


def _shards(step: "PreparedStep", req: int, token: int, group: int, rule: Rule) -> tuple[str, str]:
    """Return what decode context parallelism gave a token or a request's lengths, and allows."""
    tables, arrays, dcp = step.batch.tables, step.arrays, step.shape.dcp
    if rule == Rule.SHARDED_LENS:
        lens = arrays.dcp_local_seq_lens[req], arrays.dcp_local_context_lens[req]
        length = int(arrays.seq_lens[req]) if req < step.num_reqs else 0
        computed = int(arrays.num_computed_tokens[req])
        is_kept = dcp.owner(np.arange(length)) == dcp.rank
        allowed = f"{is_kept.sum()}, {is_kept[:computed].sum()} of them computed"
        given = f"{lens[0]}, {lens[1]} of them computed"
        return given, f"{allowed}, which rank {dcp.rank} keeps"
    position, slot = int(arrays.positions[token]), int(arrays.slot_mapping[group, token])
    owner = dcp.owner(position)
    given = f"{slot} on rank {dcp.rank}"
    if owner != dcp.rank:
        return given, f"-1: rank {owner} keeps position {position}"
    size = int(tables.block_sizes[group])
    block, offset = divmod(dcp.local_position(position), size)
    number = int(tables.block_table(group)[step.slots[req], block])
    return given, f"{number * size + offset}, in its block {number}"


RULES: dict[Rule, tuple[str, str]] = {
    Rule.STARTS_AT_ZERO: ("starts", "query_start_loc starts at 0"),
    Rule.QUERY_LENS: ("query lengths", "query_start_loc rises by the scheduled tokens"),
    Rule.ENDS_AT_TOKENS: ("end", "real requests end at total_num_scheduled_tokens"),
    Rule.SEQ_LENS: ("lengths", "seq_lens are the computed and the scheduled tokens"),
    Rule.MODEL_LEN: ("model length", "seq_lens stay within max_model_len"),
    Rule.BLOCKS: ("blocks", "sequences fit the blocks that their request owns"),
    Rule.POSITIONS: ("positions", "positions continue after the computed tokens"),
    Rule.VOCABULARY: ("vocabulary", "input_ids are of the vocabulary"),
    Rule.SLOTS: ("slots", "slots lie in the cache and not in the null block"),
    Rule.LAST_SLOT: ("table", "a slot is the one that the block table names"),
    Rule.MAX_QUERY_LEN: ("longest query", "max_query_len is the longest query's"),
    Rule.MAX_SEQ_LEN: ("longest sequence", "max_seq_len is the longest sequence's"),
    Rule.LOGITS: ("logits", "logits_indices are tokens of the step"),
    Rule.PADDING_TOKENS: ("padding", "padding writes no slot"),
    Rule.PADDING_REQS: ("padding requests", "padding requests are as long as their tokens"),
    Rule.ENDS_AT_INPUT_TOKENS: ("TND end", "query_start_loc of a full graph ends at its tokens"),
    Rule.LOCAL_QUERY_LENS: ("local queries", "chunk_local_query_start_loc rises from 0"),
    Rule.LOCAL_SEQ_LENS: ("local lengths", "chunk_local_seq_lens stay within a chunk"),
    Rule.LOCAL_ENDS_AT_TOKENS: ("local end", "virtual requests end at the step's tokens"),
    Rule.LOCAL_ENDS_AT_INPUT_TOKENS: (
        "local TND end",
        "chunk_local_query_start_loc of a full graph ends at its tokens",
    ),
    Rule.NO_SLOT: ("state slots", "layers with states write no slots"),
    Rule.STATE_BLOCKS: ("states", "a state is in the block that the table names"),
    Rule.STATE_SHARED: ("shared state", "no two running requests share a state"),
    Rule.STATE_BEGINS: ("initial state", "a state is read if tokens are computed already"),
    Rule.SHARDED_SLOTS: ("shared slots", "a token has its slot on the one rank that keeps it"),
    Rule.SHARDED_LENS: ("shared lengths", "a rank's lengths count the tokens that it keeps"),
    Rule.STATE_PADDING: (
        "padding states",
        "padding, and tokens whose state is not kept, have that of the null block",
    ),
    Rule.STATE_ACCEPTED: ("accepted tokens", "a state is that after the last token that counts"),
}
