"""Tracks which request owns each block and wrote each slot, from step to step.

A worker sees the scheduler's decisions only: which blocks a request gets, and that it finished or
was preempted. From these the ledger knows each block's purpose without the runner's own tables. The
content of a slot is named by a hash of the tokens up to it and of what was loaded as the request's
adapter, as prefix caching names blocks: only requests with the same beginning may read the same
slot. A recurrent state is named in the same way, by all tokens that are in it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm_npu_prep.observe.violation import StepCheckError, given_allowed
from vllm_npu_prep.prep.arrays import PAD_SLOT_ID
from vllm_npu_prep.prep.context_shards import WHOLE_CONTEXTS, ContextShards
from vllm_npu_prep.prep.freed_blocks import first_needed
from vllm_npu_prep.prep.states import first_kept, state_column
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    from vllm_npu_prep.prep.batch import PreparedStep

NULL_BLOCK = 0
UNKNOWN = -1
"""A sampled token whose id this process never saw."""

NONE_KEPT: Mapping[str, int] = {}

NOBODY = 0
"""The content of a slot that was never written."""

LARGEST_CONTENT = 1 << 62
"""The upper limit of names of contents, so that a group's index can be added within int64."""


@dataclass(frozen=True)
class LedgerGroup:
    """Properties of a KV-cache group that the ledger needs."""

    block_size: int  # tokens of a table's block; with shards, on all ranks together
    blocks_per_page: int = 1  # blocks of the tables in one of the scheduler's
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    holds_states: bool = False  # its blocks have a state each, and no slots
    shards: ContextShards = WHOLE_CONTEXTS  # the part of each context that this rank keeps

    def first_needed(self, position: int) -> int:
        """Return the first position that a position's token sees; earlier blocks may be freed."""
        chunk_size, has_states = self.attention_chunk_size, self.holds_states
        return first_needed(position, self.sliding_window, chunk_size, has_states)

    def slot(self, block: int, position: int) -> int:
        """Return the slot of a position in its block; -1 if another rank keeps it."""
        if self.shards.owner(position) != self.shards.rank:
            return PAD_SLOT_ID
        size = self.block_size // self.shards.world_size
        return block * size + self.shards.local_position(position) % size

    def block_of(self, slot: int) -> int:
        return slot // (self.block_size // self.shards.world_size)

    def as_tables(self, block_ids: Iterable[int]) -> list[int]:
        """Return the block tables' ids of the scheduler's blocks, which may be pages of several."""
        pages = self.blocks_per_page
        return [page * pages + part for page in block_ids for part in range(pages)]


@dataclass
class _Request:
    """A request as the scheduler describes it."""

    adapter: int  # number of its adapter; 0: none
    prompt: list[int]  # UNKNOWN for positions given as vectors
    contents: dict[int, int]  # by position, content other than token ids: vectors, images
    blocks: list[list[int]]  # by group
    former: list[set[int]]  # blocks that it lost when it was preempted
    load: object = None  # the load of its adapter with which it began
    num_computed_tokens: int = 0
    num_cached: list[int] = field(default_factory=list)  # leading blocks that were cached, by group
    begins: bool = True  # starts or resumes in this step
    tokens: list[int] = field(default_factory=list)  # as the model read them
    chain: list[int] = field(default_factory=list)  # expected content of each position's slot
    loaded: int = 0  # leading positions that a KV connector may have loaded
    certain: int | None = None  # end of its last step without the drafts in it; None without drafts

    def extend_chain(self, end: int) -> None:
        """Name the contents of the positions up to `end`."""
        for position in range(len(self.chain), end):
            before = self.chain[-1] if self.chain else hash(self.load)
            what = self.contents.get(position, self.tokens[position])
            self.chain.append(hash((before, what)) % LARGEST_CONTENT + 1)


class SlotLedger:
    """Owners and contents of all blocks of an engine.

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
        self.groups, self.loads, self._load_of = tuple(groups), loads, load_of
        with_slots = [group for group in groups if not group.holds_states]
        width = max((group.block_size for group in with_slots), default=1)
        # [num_blocks, largest block size] int64, content of each slot
        self.contents = np.full((num_blocks, width), NOBODY, np.int64)
        self.states: dict[int, int] = {}  # content of each block that holds a state
        self.writers: dict[int, str] = {}  # last writer, by block
        self.freed: dict[int, str] = {}  # last request that gave back a block
        self.requests: dict[str, _Request] = {}
        self._handed_out: set[int] = set()  # empty blocks given out in this step

    # ----------------------------------------------------------------- the scheduler's output

    def follow(self, output: "SchedulerOutput") -> None:
        """Apply a scheduler output: finished, new and continued requests, and their blocks."""
        for request in self.requests.values():
            request.begins = False
        self._handed_out.clear()
        for req_id in output.finished_req_ids:
            self._release(req_id)
            self.requests.pop(req_id, None)
        for req_id in output.preempted_req_ids or ():
            self._release(req_id)
        self._empty(output)
        for new in output.scheduled_new_reqs:
            self._release(new.req_id)
            before, arrived = self.requests.get(new.req_id), self._arrived(new)
            if before is not None:  # preempted, by Model Runner V2
                arrived.former = before.former
            self.requests[new.req_id] = arrived
            self._begin(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for req_id, new_block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        ):
            request = self._known(req_id)
            if req_id in cached.resumed_req_ids:
                self._release(req_id)
                self._begin(req_id, new_block_ids or (), computed)
            for group, block_ids in enumerate(
                () if req_id in cached.resumed_req_ids else new_block_ids or ()
            ):
                mine = self.groups[group].as_tables(block_ids)
                request.blocks[group].extend(mine)
                self._handed_out.update(mine)
            request.num_computed_tokens = computed
            known = cached.all_token_ids.get(req_id, ())
            request.tokens[: len(known)] = known

    def _known(self, req_id: str) -> _Request:
        if req_id not in self.requests:
            raise given_allowed(
                "requests",
                "requests of a step are known",
                "a request that never arrived",
                "requests that the scheduler has added",
                request=req_id,
            )
        return self.requests[req_id]

    def _arrived(self, new: "NewRequestData") -> _Request:
        adapter = 0 if new.lora_request is None else new.lora_request.lora_int_id
        contents: dict[int, int] = {}
        is_token_ids = new.prompt_is_token_ids or [new.prompt_embeds is None] * new.prompt_len
        prompt = list(new.prompt_token_ids or [UNKNOWN] * new.prompt_len)
        if new.prompt_embeds is not None:
            for position, is_id in enumerate(is_token_ids):
                if not is_id:
                    prompt[position] = UNKNOWN
                    row = new.prompt_embeds[position].float().numpy()
                    contents[position] = hash(row.tobytes())
        for feature in new.mm_features:
            place = feature.mm_position
            for index in range(place.length):
                contents[place.offset + index] = hash((feature.identifier, index))
        empty: list[list[int]] = [[] for _ in self.groups]
        arrived = _Request(adapter, prompt, contents, empty, [set() for _ in self.groups])
        # A request that Model Runner V2 gets anew after a preemption has generated tokens already
        arrived.tokens = [*prompt, *(new.prefill_token_ids or ())[new.prompt_len :]]
        return arrived

    def _begin(self, req_id: str, block_ids: Sequence[Sequence[int]], computed: int) -> None:
        """Start a request: blocks of computed tokens are cached ones, all others are empty."""
        request = self.requests[req_id]
        request.begins, request.num_computed_tokens = True, computed
        request.load = self._load_of(request.adapter) if request.adapter else None
        request.tokens = request.tokens or request.prompt.copy()
        request.chain.clear()
        request.certain = None
        request.blocks = [g.as_tables(ids) for g, ids in zip(self.groups, block_ids)]
        request.num_cached = [computed // group.block_size for group in self.groups]
        request.loaded = computed if self.loads else 0
        for blocks, former, cached in zip(request.blocks, request.former, request.num_cached):
            former.difference_update(blocks)
            self._handed_out.update(blocks[cached:])

    def _release(self, req_id: str) -> None:
        request = self.requests.get(req_id)
        if request is None:
            return
        for blocks, former in zip(request.blocks, request.former):
            former.update(blocks)
            self.freed.update(dict.fromkeys(blocks, req_id))
        request.blocks = [[] for _ in self.groups]

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
        req_ids: Sequence[str],
        input_ids: np.ndarray,
        num_kept: Mapping[str, int] = NONE_KEPT,
    ) -> None:
        """Check and note the slots and recurrent states that a step reads and writes.

        Parameters
        ----------
        req_ids
            Ids of the batch's requests, in order.
        input_ids
            Token ids as the model reads them, ``[total_num_scheduled_tokens]``.
        num_kept
            Tokens that the last step sampled for each request in it, accepted drafts included. The
            scheduler may count all drafts of that step as accepted (asynchronous scheduling).

        Raises
        ------
        StepCheckError
            Names the request and the token.
        """
        owners = self._owners()
        self._tables = [step.batch.tables.block_table(i) for i in range(len(self.groups))]
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

    def _owners(self) -> dict[int, dict[str, bool]]:
        """Return the requests that own each block, and whether they got it as a cached one.

        Blocks before a window have no owner, although tables may still name them.
        """
        owners: dict[int, dict[str, bool]] = {}
        for req_id, request in self.requests.items():
            for index, group in enumerate(self.groups):
                first = group.first_needed(request.num_computed_tokens) // group.block_size
                last = {block: place for place, block in enumerate(request.blocks[index])}
                for place, block in enumerate(request.blocks[index][first:], first):
                    if block == NULL_BLOCK or (group.holds_states and place != last[block]):
                        continue  # blocks for drafts' states move along with a prompt
                    of_block = owners.setdefault(block, {})
                    if req_id in of_block:
                        raise given_allowed(
                            "owners",
                            "a request owns a block once",
                            f"block {block} twice",
                            "once",
                            request=req_id,
                            group=index,
                        )
                    of_block[req_id] = place < request.num_cached[index]
        for block, of_block in owners.items():
            fresh = [req_id for req_id, is_cached in of_block.items() if not is_cached]
            others = [r for r in of_block if r not in fresh and not self.requests[r].begins]
            if len(fresh) > 1 or (block in self._handed_out and fresh and others):
                raise given_allowed(
                    "owners",
                    "requests share cached blocks only",
                    f"block {block}, also of request {[*fresh[1:], *others][0]}",
                    "a block of its own",
                    request=fresh[0],
                )
        return owners

    def _feed(
        self,
        step: "PreparedStep",
        row: int,
        req_id: str,
        input_ids: np.ndarray,
        num_kept: int | None,
    ) -> None:
        """Check counts against the scheduler's, and prompt tokens against the prompt."""
        request = self._known(req_id)
        if request.adapter and (load := self._load_of(request.adapter)) != request.load:
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

    def _adopt(self, request: _Request, end: int) -> None:
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
            block = blocks[position // size]
            expected = group.slot(block, position)
            if slot != expected:
                wrong = group.block_of(slot)
                if wrong == block or PAD_SLOT_ID in (slot, expected):
                    raise given_allowed(
                        "slot",
                        "a slot belongs to its position",
                        slot,
                        expected,
                        request=req_id,
                        token=first + offset,
                        position=position,
                        group=index,
                    )
                raise self._misplaced(
                    "a token is written to",
                    req_id,
                    index,
                    wrong,
                    block,
                    position // size,
                    first + offset,
                    position,
                    owners,
                )
            if block == NULL_BLOCK:
                raise self._misplaced(
                    "a token is written to",
                    req_id,
                    index,
                    block,
                    "a block of its own",
                    position // size,
                    first + offset,
                    position,
                )
            for other, is_cached in owners.get(block, {}).items():
                begins = is_cached and self.requests[other].begins
                if other != req_id and not begins:
                    raise given_allowed(
                        "write into another's block",
                        "a shared block is read only",
                        f"block {block}, also of request {other}",
                        "a block of its own",
                        request=req_id,
                        token=first + offset,
                        position=position,
                        group=index,
                    )
            self.contents[block, position % size] = request.chain[position] + index
            self.states.pop(block, None)
            self.writers[block] = req_id

    def _check_blocks(self, step: "PreparedStep", row: int, req_id: str, index: int) -> None:
        """Check that a row of a block table has the blocks that its request was given."""
        request, size = self.requests[req_id], self.groups[index].block_size
        blocks, end = request.blocks[index], int(step.seq_lens[row])
        owned = int(step.batch.tables.num_blocks[index, step.slots[row]])
        named = self._tables[index][step.slots[row], :owned].tolist()
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
                raise self._misplaced("a block table names", req_id, index, given, expected, place)
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
            raise self._misplaced(text, req_id, index, block, expected[place], place, owners=owners)
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

    def _misplaced(
        self,
        what: str,
        req_id: str,
        index: int,
        block: int,
        expected: object,
        place: int,
        token: int | None = None,
        position: int | None = None,
        owners: dict[int, dict[str, bool]] | None = None,
    ) -> StepCheckError:
        request = self.requests[req_id]
        others = [r for r in (owners or self._owners()).get(block, {}) if r != req_id]
        if block == NULL_BLOCK:
            rule, given = "null block", "the null block"
        elif block in request.former[index]:
            rule, given = "stale block", f"block {block}, which it had before it was preempted"
        elif others:
            rule, given = "write into another's block", f"block {block} of request {others[0]}"
        elif block in request.blocks[index]:
            rule, given = "wrong block", f"block {block}, another one of its own"
        elif block in self.freed:
            rule = "write after free"
            given = f"block {block}, which request {self.freed[block]} freed"
        else:
            rule, given = "wrong block", f"block {block}, which no request was given"
        return given_allowed(
            rule,
            f"{what} the request's own block at place {place}",
            given,
            expected,
            request=req_id,
            token=token,
            position=position,
            group=index,
        )

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
