"""Tracks which request wrote each slot and each recurrent state, from step to step.

`BlockOwners` knows which request owns each block. The content of a slot is named by a hash of the
tokens up to it and of what was loaded as the request's adapter, as prefix caching names blocks:
only requests with the same beginning may read the same slot. A recurrent state is named in the same
way, by all tokens that are in it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_npu_prep.observe.ledger_owners import (
    NULL_BLOCK,
    UNKNOWN,
    BlockOwners,
    LedgerGroup,
    LedgerRequest,
)
from vllm_npu_prep.observe.violation import given_allowed
from vllm_npu_prep.prep.arrays import PAD_SLOT_ID
from vllm_npu_prep.prep.recurrent_states import first_kept, state_column
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_npu_prep.prep.batch import PreparedStep

NONE_KEPT: Mapping[str, int] = {}

NOBODY = 0
"""The content of a slot that was never written."""


class SlotLedger:
    """The contents of all blocks of an engine, and with `BlockOwners` their owners.

    Parameters
    ----------
    groups
        The KV-cache groups, which share their blocks.
    num_blocks
        Number of blocks of the block tables, which each group has.
    loads
        Whether a KV connector may fill blocks.
    load_of
        Returns what an adapter of this number has been loaded as; None if it isn't.
    """

    def __init__(
        self,
        groups: Sequence[LedgerGroup],
        num_blocks: int,
        loads: bool = False,
        load_of: Callable[[int], object] = lambda number: None,
    ) -> None:
        self.groups = tuple(groups)
        self.owned = BlockOwners(groups, loads, load_of)
        self.requests = self.owned.requests
        with_slots = [group for group in groups if not group.holds_states]
        width = max((group.block_size for group in with_slots), default=1)
        # [num_blocks, largest block size] int64, content of each slot
        self.contents = np.full((num_blocks, width), NOBODY, np.int64)
        self.states: dict[int, int] = {}  # content of each block that holds a state
        self.writers: dict[int, str] = {}  # last writer, by block

    # ----------------------------------------------------------------- the scheduler's output

    def follow(self, output: "SchedulerOutput") -> None:
        """Apply a scheduler output: requests, their blocks, and the blocks that it empties."""
        self.owned.follow(output)
        self._empty(output)

    def _empty(self, output: "SchedulerOutput") -> None:
        """Apply the zeroing and copying of blocks before the step."""
        pages = self.groups[0].blocks_per_page if self.groups else 1
        for block in output.new_block_ids_to_zero or ():
            self.contents[block * pages : (block + 1) * pages] = NOBODY
            self.states.pop(block, None)
        for source, target in output.kv_cache_block_copies or ():
            of_source = self.contents[source * pages : (source + 1) * pages]
            self.contents[target * pages : (target + 1) * pages] = of_source
            self.states.pop(target, None)
            if source in self.states:
                self.states[target] = self.states[source]

    # ----------------------------------------------------------------- the step

    def verify(
        self,
        step: "PreparedStep",
        req_ids: Sequence[str],  # ids of the batch's requests, in order
        input_ids: np.ndarray,  # token ids as the model reads them, [total_num_scheduled_tokens]
        num_kept: Mapping[str, int] = NONE_KEPT,
    ) -> None:
        """Check and note the slots and recurrent states that a step reads and writes.

        Parameters
        ----------
        num_kept
            Tokens that the last step sampled for each request in it, accepted drafts included. The
            scheduler may count all drafts of that step as accepted (asynchronous scheduling).

        Raises
        ------
        StepCheckError
            Names the request and the token.
        """
        owners = self.owned.owners()
        self._read_tables(step)
        for row, req_id in enumerate(req_ids):
            self._feed(step, row, req_id, input_ids, num_kept.get(req_id))
            for index, group in enumerate(self.groups):
                if group.holds_states:
                    self._check_blocks(step, row, req_id, index)
                    self._read_state(step, row, req_id, index)
                else:
                    self._write(step, row, req_id, index, owners)
        for row, req_id in enumerate(req_ids):  # a request may read what others write in this step
            for index, group in enumerate(self.groups):
                if group.holds_states:
                    self._write_state(step, row, req_id, index, owners)
                else:
                    self._read(step, row, req_id, index)

    def check_tables(self, step: "PreparedStep", req_ids: Sequence[str]) -> None:
        """Check only that each request's rows of the block tables have the blocks that it got."""
        self._read_tables(step)
        for row, req_id in enumerate(req_ids):
            self.owned.known(req_id)
            for index in range(len(self.groups)):
                self._check_blocks(step, row, req_id, index)

    def _read_tables(self, step: "PreparedStep") -> None:
        self._tables = [step.batch.tables.block_table(i) for i in range(len(self.groups))]

    def _feed(
        self,
        step: "PreparedStep",
        row: int,
        req_id: str,
        input_ids: np.ndarray,
        num_kept: int | None,
    ) -> None:
        """Check counts against the scheduler's, and prompt tokens against the prompt."""
        request = self.owned.known(req_id)
        if request.adapter and (load := self.owned.load_of(request.adapter)) != request.load:
            raise given_allowed(
                "adapter",
                "a request computes with one load of its adapter",
                f"load {load} of adapter {request.adapter}",
                f"load {request.load}, with which it began",
                request=req_id,
            )
        computed, told = int(step.num_computed_tokens[row]), request.num_computed_tokens
        text = "computed tokens are the scheduler's"
        if num_kept is not None and request.certain is not None:
            told = min(told, request.certain - 1 + num_kept)
            text += ", without the drafts that the last step rejected"
        if computed != told:
            raise given_allowed("computed tokens", text, computed, told, request=req_id)
        drafts = int(step.batch.num_draft_tokens[row])
        request.certain = int(step.seq_lens[row]) - drafts if drafts else None
        start, end = step.query_start_loc[row : row + 2].tolist()
        fed: list[int] = input_ids[start:end].tolist()
        for offset, token_id in enumerate(fed[: max(0, len(request.prompt) - computed)]):
            position = computed + offset
            expected = request.prompt[position]
            if expected not in (token_id, UNKNOWN) and position not in request.contents:
                raise given_allowed(
                    "prompt",
                    "input_ids in a prompt are the prompt's",
                    token_id,
                    expected,
                    request=req_id,
                    token=start + offset,
                    position=position,
                )
        unknown = computed - len(request.tokens)
        request.tokens += [UNKNOWN] * unknown
        request.tokens[computed : computed + len(fed)] = fed
        del request.chain[computed:]
        self._adopt(request, computed)
        request.extend_chain(computed + len(fed))

    def _adopt(self, request: LedgerRequest, end: int) -> None:
        """Take contents from the slots for positions whose tokens this process never saw."""
        while len(request.chain) < end:
            position = len(request.chain)
            is_unknown = request.tokens[position] == UNKNOWN and position not in request.contents
            index = next((i for i, g in enumerate(self.groups) if not g.holds_states), None)
            if not is_unknown or index is None:
                request.extend_chain(position + 1)
                continue
            block, offset = divmod(position, self.groups[index].block_size)
            kept = int(self.contents[request.blocks[index][block], offset]) - index
            request.chain.append(max(kept, 1))

    def _write(
        self,
        step: "PreparedStep",
        row: int,
        req_id: str,
        index: int,
        owners: dict[int, dict[str, bool]],
    ) -> None:
        self._check_blocks(step, row, req_id, index)
        group, request = self.groups[index], self.requests[req_id]
        blocks, size = request.blocks[index], group.block_size
        computed, end = int(step.num_computed_tokens[row]), int(step.seq_lens[row])
        first = int(step.query_start_loc[row])
        slots = step.slot_mapping[index][first : first + end - computed].tolist()
        for offset, slot in enumerate(slots):
            position = computed + offset
            place = position // size
            block = blocks[place]
            at: dict[str, Any] = {"request": req_id, "group": index}
            at |= {"token": first + offset, "position": position}
            expected = group.slot(block, position)
            if slot != expected:
                wrong = group.block_of(slot)
                if wrong == block or PAD_SLOT_ID in (slot, expected):
                    text = "a slot belongs to its position"
                    raise given_allowed("slot", text, slot, expected, **at)
                text = "a token is written to"
                raise self.owned.misplaced(text, wrong, block, place, owners, **at)
            if block == NULL_BLOCK:
                text, allowed = "a token is written to", "a block of its own"
                raise self.owned.misplaced(text, block, allowed, place, **at)
            for other, is_cached in owners.get(block, {}).items():
                begins = is_cached and self.requests[other].begins
                if other != req_id and not begins:
                    raise given_allowed(
                        "write into another's block",
                        "a shared block is read only",
                        f"block {block}, also of request {other}",
                        "a block of its own",
                        **at,
                    )
            self.contents[block, position % size] = request.chain[position] + index
            self.states.pop(block, None)
            self.writers[block] = req_id

    def _check_blocks(self, step: "PreparedStep", row: int, req_id: str, index: int) -> None:
        """Check that a row of a block table has the blocks that its request was given."""
        request, size = self.requests[req_id], self.groups[index].block_size
        blocks, end = request.blocks[index], int(step.seq_lens[row])
        owned = int(step.batch.tables.num_blocks[index, step.request_rows[row]])
        named = self._tables[index][step.request_rows[row], :owned].tolist()
        if end > size * len(blocks):
            raise given_allowed(
                "blocks",
                "sequences fit the blocks that their request owns",
                end,
                f"up to {size * len(blocks)}",
                request=req_id,
                group=index,
            )
        for place, (given, expected) in enumerate(zip(named, blocks)):
            if given != expected:
                at: dict[str, Any] = {"request": req_id, "group": index}
                raise self.owned.misplaced("a block table names", given, expected, place, **at)
        if len(named) != len(blocks):
            raise given_allowed(
                "block table",
                "a row of a block table is as long as its request's blocks",
                counted(len(named), "block"),
                f"{len(blocks)}",
                request=req_id,
                group=index,
            )

    def _state_of(self, step: "PreparedStep", row: int, index: int, name: str) -> int:
        """Return the block of a request's recurrent state in the step's array of that name."""
        return int(getattr(step, name)[step.shape.states.groups.index(index), row])

    def _read_state(self, step: "PreparedStep", row: int, req_id: str, index: int) -> None:
        """Check that a request reads the state of its own last computed token, or none."""
        computed, request = int(step.num_computed_tokens[row]), self.requests[req_id]
        if not computed:
            return  # nothing is read, as the cheap check has found
        expected = request.chain[computed - 1] + index
        block = self._state_of(step, row, index, "initial_state_indices")
        if computed <= request.loaded:
            self.states[block] = expected
        if self.states.get(block) == expected:
            return
        if block not in self.states:
            rule, given = "use before write", f"block {block}, whose recurrent state nobody wrote"
        else:
            writer = self.writers.get(block)
            rule, given = "state content", f"block {block}, last written by request {writer}"
        raise given_allowed(
            rule,
            "a request reads the recurrent state after its last computed token",
            given,
            f"the state after {computed} tokens",
            request=req_id,
            group=index,
        )

    def _write_state(
        self,
        step: "PreparedStep",
        row: int,
        req_id: str,
        index: int,
        owners: dict[int, dict[str, bool]],
    ) -> None:
        """Check that a request writes a state of its own, and note what is in it then."""
        end, request = int(step.seq_lens[row]), self.requests[req_id]
        place = self._place_of_state(step, row, index)
        block, expected = self._state_of(step, row, index, "state_indices"), request.blocks[index]
        if block != expected[place] or block == NULL_BLOCK:
            text = "a recurrent state is written to"
            at: dict[str, Any] = {"request": req_id, "group": index}
            raise self.owned.misplaced(text, block, expected[place], place, owners, **at)
        others = [other for other in owners.get(block, {}) if other != req_id]
        if others:
            raise given_allowed(
                "shared state",
                "no two running requests share a recurrent state",
                f"block {block}, also of request {others[0]}",
                "a block of its own",
                request=req_id,
                group=index,
            )
        for written, after in self._written_states(step, row, index, block, end):
            self.states[written] = request.chain[after - 1] + index
            self.contents[written] = NOBODY
            self.writers[written] = req_id

    def _place_of_state(self, step: "PreparedStep", row: int, index: int) -> int:
        """Return the place among a request's blocks of the first state that it writes in a step."""
        lengths = int(step.num_computed_tokens[row]), int(step.seq_lens[row])
        first = first_kept(*lengths, step.keeps_each_state(row))
        return state_column(first, 0, self.groups[index].block_size, step.shape.states.num_drafts)

    def _written_states(
        self, step: "PreparedStep", row: int, index: int, block: int, end: int
    ) -> list[tuple[int, int]]:
        """Return the blocks that a request writes, each with the number of tokens in its state.

        With speculation, a decode writes the state after each of its tokens.
        """
        if not step.keeps_each_state(row):
            return [(block, end)]
        start, stop = step.query_start_loc[row : row + 2].tolist()
        of_tokens = step.token_state_indices[step.shape.states.groups.index(index), start:stop]
        return list(zip(of_tokens.tolist(), range(end - (stop - start) + 1, end + 1)))

    def _read(self, step: "PreparedStep", row: int, req_id: str, index: int) -> None:
        group, request = self.groups[index], self.requests[req_id]
        computed, end = int(step.num_computed_tokens[row]), int(step.seq_lens[row])
        first = group.first_needed(computed)
        positions = np.arange(first, end)
        blocks = np.array(request.blocks[index], np.int64)[positions // group.block_size]
        offsets = positions % group.block_size
        expected = np.array(request.chain[first:end], np.int64) + index
        loaded = (positions < request.loaded) & (blocks != NULL_BLOCK)
        self.contents[blocks[loaded], offsets[loaded]] = expected[loaded]
        wrong = np.flatnonzero((self.contents[blocks, offsets] != expected) | (blocks == 0))
        if not len(wrong):
            return
        position, block = int(positions[wrong[0]]), int(blocks[wrong[0]])
        if block == NULL_BLOCK:
            rule, given = "null block", "the null block"
        elif self.contents[block, position % group.block_size] == NOBODY:
            rule, given = "use before write", f"a slot of block {block} that nobody wrote"
        else:
            rule = "content"
            given = f"a slot of block {block}, last written by request {self.writers.get(block)}"
        raise given_allowed(
            rule,
            "attention reads what was written for the same tokens",
            given,
            "a slot that holds this position",
            request=req_id,
            position=position,
            group=index,
        )
