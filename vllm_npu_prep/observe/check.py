"""The check ``{"npu_prep": {"check": "cheap"}}``: one compiled pass over a step's host arrays.

The pass is `vllm_npu_prep.prep.checks`; this module describes the faults that it finds.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vllm_npu_prep.observe.violation import StepCheckError, given_allowed
from vllm_npu_prep.prep.checks import Fault, Rule, find_fault
from vllm_npu_prep.prep.recurrent_states import first_kept, read_column, state_column
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_npu_prep.prep.batch import PreparedStep


class StepCheck:
    """The cheap check of a runner's steps.

    Token ids are below `vocab_size`; `num_slots` has the slots of each KV-cache group.
    """

    def __init__(self, vocab_size: int, num_slots: list[int]) -> None:
        # Of `find_fault`: the end of the allowed token ids, then `num_slots`
        self.limits = np.array([vocab_size, *num_slots], np.int64)  # [1 + groups]
        self.limits_with_embeds = self.limits.copy()
        self.limits_with_embeds[0] = 1 << 31
        # Of steps of token ids, checked as they are written (`StepBatch.check_limits`)
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
        shape = step.batch.tables.shape
        in_pass = step.rule == Rule.HOLDS and not shape.local.groups and not shape.states.groups
        if in_pass and shape.pcp.world_size == 1:
            return  # virtual requests, states and shares of ranks are written after that pass
        # A dummy run has no requests
        self.check_rules(step, runner.input_batch.req_ids if step.num_reqs else [])

    def check_rules(self, step: "PreparedStep", req_ids: list[str]) -> None:
        """Check a step of any runner; `req_ids` has its requests, in order."""
        limits = self.limits_with_embeds if step.batch.takes_embeds else self.limits
        fault = find_fault(step, limits)
        if fault is not None:
            raise explain_fault(step, limits, fault, req_ids)


class FaultPlace:
    """A step, and the place where it breaks a rule; -1 stands for the whole of a kind.

    `limits` are those of `find_fault`, and `req` is a row of the batch, or the virtual request of a
    rule about these.
    """

    def __init__(
        self,
        step: "PreparedStep",
        limits: np.ndarray,
        req: int,
        token: int,
        group: int,
        req_ids: list[str],
    ) -> None:
        self.step, self.limits, self.req_ids = step, limits, req_ids
        self.req, self.token, self.group = req, token, group
        self.arrays, self.tables = step.arrays, step.batch.tables
        self.num_tokens = step.total_num_scheduled_tokens
        self.starts = step.arrays.query_start_loc
        self.local_starts = step.arrays.chunk_local_query_start_loc

    @property
    def row(self) -> int:
        """The row of the tables that is the request's."""
        return int(self.step.request_rows[self.req])

    @property
    def seq_len(self) -> int:
        return int(self.arrays.seq_lens[self.req])

    @property
    def computed(self) -> int:
        return int(self.arrays.num_computed_tokens[self.req])

    @property
    def slot(self) -> int:
        return int(self.arrays.slot_mapping[self.group, self.token])

    @property
    def block_size(self) -> int:
        return int(self.tables.block_sizes[self.group])

    def named_slot(self, position: int) -> str:
        """Name the slot of one of the request's tokens on this rank, by its row of the table."""
        block, offset = divmod(position, self.block_size)
        number = int(self.tables.block_table(self.group)[self.row, block])
        return f"{number * self.block_size + offset}, in its block {number}"

    def borders(self, starts: np.ndarray) -> str:
        """Name the first token of the request and that of the next one."""
        return f"{starts[self.req]} to {starts[self.req + 1]}"


GivenAllowed: TypeAlias = tuple[object, object]
"""What a step has at the place of a fault, and what the rule allows there."""


def _query_lens(at: FaultPlace) -> GivenAllowed:
    scheduled = f"{at.step.query_lens[at.req]} scheduled tokens of {at.step.num_input_tokens}"
    return at.borders(at.starts), scheduled


def _seq_lens(at: FaultPlace) -> GivenAllowed:
    computed = max(0, int(at.tables.num_computed_tokens[at.row]))
    allowed = f"{computed + at.step.query_lens[at.req]} of {computed} computed"
    return f"{at.seq_len} of {at.computed} computed", allowed


def _blocks(at: FaultPlace) -> GivenAllowed:
    owned = int(at.tables.num_blocks[at.group, at.row])
    room = owned * at.tables.tokens_per_block(at.group)
    return at.seq_len, f"up to {room} in its {counted(owned, 'block')}"


def _padding_reqs(at: FaultPlace) -> GivenAllowed:
    return (
        f"tokens {at.borders(at.starts)}, length {at.seq_len}, {at.computed} of them computed",
        f"tokens that rise to {at.step.num_input_tokens} at most, and a length that is their "
        f"number, up to max_model_len {at.tables.max_model_len}, 0 of them computed",
    )


def _local_seq_lens(at: FaultPlace) -> GivenAllowed:
    arrays, req = at.arrays, at.req
    start, end = at.local_starts[req : req + 2].tolist()
    computed = int(arrays.chunk_local_num_computed_tokens[req])
    return (
        f"{arrays.chunk_local_seq_lens[req]} of {computed} computed",
        f"{computed + end - start} of {computed} computed, up to a chunk of "
        f"{at.step.shape.local.attention_chunk_size}",
    )


def _sharded_slots(at: FaultPlace) -> GivenAllowed:
    dcp, position = at.step.shape.dcp, int(at.arrays.positions[at.token])
    owner, given = dcp.owner(position), f"{at.slot} on rank {dcp.rank}"
    if owner != dcp.rank:
        return given, f"-1: rank {owner} keeps position {position}"
    return given, at.named_slot(dcp.local_position(position))


def _sharded_lens(at: FaultPlace) -> GivenAllowed:
    arrays, dcp, req = at.arrays, at.step.shape.dcp, at.req
    length = at.seq_len if req < at.step.num_reqs else 0
    is_kept = dcp.owner(np.arange(length)) == dcp.rank
    allowed = f"{is_kept.sum()}, {is_kept[: at.computed].sum()} of them computed"
    given = f"{arrays.dcp_local_seq_lens[req]}, {arrays.dcp_local_context_lens[req]}"
    return f"{given} of them computed", f"{allowed}, which rank {dcp.rank} keeps"


def _reads_and_writes(at: FaultPlace, index: int) -> str:
    reads, writes = at.arrays.initial_state_indices, at.arrays.state_indices
    return f"reads block {reads[index, at.req]}, writes block {writes[index, at.req]}"


def _state_blocks(at: FaultPlace) -> GivenAllowed:
    step, arrays, states = at.step, at.arrays, at.step.shape.states
    index, row = states.groups.index(at.group), at.tables.block_table(at.group)[at.row]

    sizes = at.block_size, states.num_drafts
    first = first_kept(at.computed, at.seq_len, step.keeps_each_state(at.req))
    token = max(at.token - int(at.starts[at.req]), 0)  # the first one if there is none
    after = f"block {row[state_column(first, token, *sizes)]}"
    if at.token >= 0:
        given = f"writes block {arrays.token_state_indices[index, at.token]}"
        return given, f"writes {after}, which is not the null block"
    if not at.computed:
        given = f"writes block {arrays.state_indices[index, at.req]}"
        return given, f"writes {after}, which is not the null block"
    kept = int(arrays.num_accepted_tokens[at.req]) if states.num_drafts else 1
    before = row[read_column(at.computed, kept, *sizes)]
    allowed = f"reads block {before}, writes {after}, and neither is the null block"
    return _reads_and_writes(at, index), allowed


def _state_shared(at: FaultPlace) -> GivenAllowed:
    """Say which recurrent state of a request another one has in this step, too, and who that is."""
    arrays, req, index = at.arrays, at.req, at.step.shape.states.groups.index(at.group)
    num_decodes = at.step.states.num_decodes if at.step.shape.states.num_drafts else 0
    written, own = [], "a block of its own"
    for each in range(at.step.num_reqs):
        tokens = slice(*at.starts[each : each + 2].tolist())
        of_tokens = arrays.token_state_indices[index, tokens].tolist() if num_decodes else []
        blocks = of_tokens if each < num_decodes else [int(arrays.state_indices[index, each])]
        written.append(blocks)
    for block in written[req]:
        for other, blocks in enumerate(written):
            if other != req and block in blocks:
                return f"writes block {block}, as request {at.req_ids[other]} does", own
        if written[req].count(block) > 1:
            return f"writes block {block} after two of its tokens", own
    reads = int(arrays.initial_state_indices[index, req])
    writer = next(other for other, blocks in enumerate(written) if other != req and reads in blocks)
    return f"reads block {reads}, which request {at.req_ids[writer]} writes", own


def _state_begins(at: FaultPlace) -> GivenAllowed:
    allowed = f"{bool(at.computed)}, with {counted(at.computed, 'computed token')}"
    return bool(at.arrays.has_initial_state[at.req]), allowed


def _state_accepted(at: FaultPlace) -> GivenAllowed:
    kept = int(at.step.batch.num_accepted_tokens[at.req]) if at.computed else 1
    return at.arrays.num_accepted_tokens[at.req], kept


def _state_padding(at: FaultPlace) -> GivenAllowed:
    arrays, req = at.arrays, at.req
    if at.group < 0:  # a padding request breaks a rule that all groups share
        if arrays.has_initial_state[req]:
            return "an initial state", "none"
        return counted(int(arrays.num_accepted_tokens[req]), "accepted token"), "1"
    index = at.step.shape.states.groups.index(at.group)
    if at.token >= 0:
        return f"block {arrays.token_state_indices[index, at.token]}", "the null block"
    return _reads_and_writes(at, index), "the null block"


def _rank_tokens(at: FaultPlace) -> GivenAllowed:
    step, arrays, rank = at.step, at.arrays, at.step.shape.pcp.rank
    if at.token >= at.num_tokens:
        return "a token", f"padding after its {counted(step.pcp.num_tokens, 'token')}"
    owner, place = divmod(int(step.gathered_places()[at.token]), step.num_rank_tokens)
    if owner != rank:
        return f"its tokens up to rank {owner}'s", f"room for {step.num_rank_tokens}"
    given = f"token {arrays.pcp_input_ids[place]} at position {arrays.pcp_positions[place]}"
    of_batch = arrays.input_ids[at.token], arrays.positions[at.token]
    allowed = f"token {of_batch[0]} at position {of_batch[1]}, at place {place} of rank {rank}"
    return given, allowed


def _rank_slots(at: FaultPlace) -> GivenAllowed:
    slots = at.arrays.pcp_slot_mapping
    if at.token >= at.num_tokens:
        return "a slot of padding", "-1"
    place = int(at.step.gathered_places()[at.token])
    own = at.arrays.slot_mapping[:, at.token].tolist()
    return f"{slots[:, place].tolist()} at place {place} of all ranks", own


def _rank_rows(at: FaultPlace) -> GivenAllowed:
    step, arrays, row = at.step, at.arrays, at.req
    first, end = arrays.pcp_query_start_loc[row : row + 2].tolist()
    given = (
        f"tokens {first} to {end} of request {arrays.pcp_table_rows[row]}, length "
        f"{arrays.pcp_seq_lens[row]}, {arrays.pcp_num_computed_tokens[row]} of them before it"
    )
    positions = arrays.pcp_positions[first:end].tolist()
    own = np.flatnonzero(step.computing_ranks() == step.shape.pcp.rank)
    request = step.req_indices[own[first:][:1]].tolist()
    allowed = f"a chunk of request {request}, at positions {positions[:1]} to {positions[-1:]}"
    return given, f"{allowed}, with a length of one more"


def _rank_samples(at: FaultPlace) -> GivenAllowed:
    given = f"row {at.arrays.pcp_gathered_rows[at.req]} of {at.arrays.pcp_logits_indices.tolist()}"
    last = int(at.step.gathered_places()[at.starts[at.req + 1] - 1])
    owner, place = divmod(last, at.step.num_rank_tokens)
    allowed = f"its last token, position {at.seq_len - 1}, which rank {owner} computes"
    return given, f"{allowed} at place {place}"


def _rank_padding(at: FaultPlace) -> GivenAllowed:
    given = f"length {at.arrays.pcp_seq_lens[at.req]}, table {at.arrays.pcp_table_rows[at.req]}"
    return given, f"as many as its tokens, table {len(at.tables.token_ids)}, of null blocks"


READS: dict[Rule, Callable[[FaultPlace], GivenAllowed]] = {
    Rule.STARTS_AT_ZERO: lambda at: (at.starts[0], 0),
    Rule.QUERY_LENS: _query_lens,
    Rule.ENDS_AT_TOKENS: lambda at: (at.starts[at.step.num_reqs], at.num_tokens),
    Rule.SEQ_LENS: _seq_lens,
    Rule.MODEL_LEN: lambda at: (at.seq_len, f"up to max_model_len {at.tables.max_model_len}"),
    Rule.BLOCKS: _blocks,
    Rule.POSITIONS: lambda at: (
        at.arrays.positions[at.token],
        at.computed + at.token - int(at.starts[at.req]),
    ),
    Rule.VOCABULARY: lambda at: (at.arrays.input_ids[at.token], f"0 to {at.limits[0] - 1}"),
    Rule.SLOTS: lambda at: (at.slot, f"{at.block_size} to {at.limits[1 + at.group] - 1}"),
    Rule.LAST_SLOT: lambda at: (at.slot, at.named_slot(at.seq_len - 1)),
    Rule.MAX_QUERY_LEN: lambda at: (at.step.max_query_len, at.step.query_lens.max(initial=0)),
    Rule.MAX_SEQ_LEN: lambda at: (at.step.max_seq_len, at.step.seq_lens.max(initial=0)),
    Rule.LOGITS: lambda at: (
        f"token {at.token} in {at.step.logits_indices.tolist()}",
        f"rising, below {at.num_tokens}",
    ),
    Rule.PADDING_TOKENS: lambda at: (at.slot, "-1"),
    Rule.PADDING_REQS: _padding_reqs,
    Rule.ENDS_AT_INPUT_TOKENS: lambda at: (at.starts[-1], at.step.num_input_tokens),
    Rule.LOCAL_QUERY_LENS: lambda at: (
        at.borders(at.local_starts),
        f"rising from 0 to {at.step.num_input_tokens} at most",
    ),
    Rule.LOCAL_SEQ_LENS: _local_seq_lens,
    Rule.LOCAL_ENDS_AT_TOKENS: lambda at: (at.local_starts[at.req + 1], at.num_tokens),
    Rule.LOCAL_ENDS_AT_INPUT_TOKENS: lambda at: (at.local_starts[-1], at.step.num_input_tokens),
    Rule.NO_SLOT: lambda at: (at.slot, "-1"),
    Rule.STATE_BLOCKS: _state_blocks,
    Rule.STATE_SHARED: _state_shared,
    Rule.STATE_BEGINS: _state_begins,
    Rule.STATE_PADDING: _state_padding,
    Rule.SHARDED_SLOTS: _sharded_slots,
    Rule.SHARDED_LENS: _sharded_lens,
    Rule.STATE_ACCEPTED: _state_accepted,
    Rule.RANK_TOKENS: _rank_tokens,
    Rule.RANK_SLOTS: _rank_slots,
    Rule.RANK_ROWS: _rank_rows,
    Rule.RANK_SAMPLES: _rank_samples,
    Rule.RANK_PADDING: _rank_padding,
}
"""What a message reads at the place of a fault, by the rule that is broken."""

OF_VIRTUAL_REQUESTS = {
    Rule.LOCAL_QUERY_LENS,
    Rule.LOCAL_SEQ_LENS,
    Rule.LOCAL_ENDS_AT_TOKENS,
    Rule.LOCAL_ENDS_AT_INPUT_TOKENS,
}
OF_ROWS = {Rule.RANK_ROWS, Rule.RANK_PADDING}
"""Rules of which `Fault.req` is a row of the rank."""


def explain_fault(
    step: "PreparedStep", limits: np.ndarray, fault: Fault, req_ids: list[str]
) -> StepCheckError:
    """Describe a fault, which `find_fault` has found in this step, as an error."""
    rule, req, token, group = fault
    if req < 0 <= token < step.total_num_scheduled_tokens:
        starts = step.arrays.query_start_loc[: step.num_reqs + 1]
        req = int(np.searchsorted(starts, token, "right")) - 1
    text = rule.text
    given, allowed = READS[rule](FaultPlace(step, limits, req, token, group, req_ids))
    who = None
    if rule in OF_VIRTUAL_REQUESTS and req >= 0:
        text = f"{text} (virtual request {req})"
    elif rule in OF_ROWS:
        text = f"{text} (row {req})"
    elif 0 <= req < step.num_reqs:
        who = req_ids[req]
    elif req >= 0:
        text = f"{text} (padding request {req})"
    if rule == Rule.LOGITS:  # the token is what was given
        token = -1
    where: dict[str, Any] = {"request": who, "token": token if token >= 0 else None}
    return given_allowed(
        rule.title, text, given, allowed, **where, group=group if group >= 0 else None
    )
