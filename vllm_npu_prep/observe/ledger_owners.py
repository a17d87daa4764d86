"""Which requests own which blocks, as the scheduler's decisions say: a part of the ledger.

A worker sees the scheduler's decisions only: which blocks a request gets, and that it finished or
was preempted. From these each block's purpose is known without the runner's own tables.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_npu_prep.observe.violation import StepCheckError, given_allowed
from vllm_npu_prep.prep.arrays import PAD_SLOT_ID
from vllm_npu_prep.prep.dcp import NO_DCP, DCPRank
from vllm_npu_prep.prep.freed_blocks import first_needed

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

NULL_BLOCK = 0
UNKNOWN = -1
"""A sampled token whose id this process never saw."""

LARGEST_CONTENT = 1 << 62
"""The upper limit of names of contents, so that a group's index can be added within int64."""


@dataclass(frozen=True)
class LedgerGroup:
    """Properties of a KV-cache group that the ledger needs."""

    block_size: int  # tokens of a table's block; with DCP, on all ranks together
    blocks_per_page: int = 1  # blocks of the tables in one of the scheduler's
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    holds_states: bool = False  # its blocks have a state each, and no slots
    dcp: DCPRank = NO_DCP  # the part of each context that this rank keeps

    def first_needed(self, position: int) -> int:
        """Return the first position that a position's token sees; earlier blocks may be freed."""
        chunk_size, has_states = self.attention_chunk_size, self.holds_states
        return first_needed(position, self.sliding_window, chunk_size, has_states)

    def slot(self, block: int, position: int) -> int:
        """Return the slot of a position in its block; -1 if another rank keeps it."""
        if self.dcp.owner(position) != self.dcp.rank:
            return PAD_SLOT_ID
        size = self.block_size // self.dcp.world_size
        return block * size + self.dcp.local_position(position) % size

    def block_of(self, slot: int) -> int:
        return slot // (self.block_size // self.dcp.world_size)

    def as_tables(self, block_ids: Iterable[int]) -> list[int]:
        """Return the block tables' ids of the scheduler's blocks, which may be pages of several."""
        pages = self.blocks_per_page
        return [page * pages + part for page in block_ids for part in range(pages)]


@dataclass
class LedgerRequest:
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


def prompt_length(new: "NewRequestData") -> int:
    """Return the tokens of a prompt, given as ids or as vectors; older vLLMs don't say it."""
    given = new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids
    return 0 if given is None else len(given)


class BlockOwners:
    """The requests of an engine, and the blocks that each owns; `SlotLedger` has the arguments."""

    def __init__(
        self, groups: Sequence[LedgerGroup], loads: bool, load_of: Callable[[int], object]
    ) -> None:
        self.groups, self.loads, self.load_of = tuple(groups), loads, load_of
        self.requests: dict[str, LedgerRequest] = {}
        self.freed: dict[int, str] = {}  # last request that gave back a block
        self._handed_out: set[int] = set()  # empty blocks given out in this step

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
            request = self.known(req_id)
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

    def known(self, req_id: str) -> LedgerRequest:
        if req_id not in self.requests:
            raise given_allowed(
                "requests",
                "requests of a step are known",
                "a request that never arrived",
                "requests that the scheduler has added",
                request=req_id,
            )
        return self.requests[req_id]

    def _arrived(self, new: "NewRequestData") -> LedgerRequest:
        adapter = 0 if new.lora_request is None else new.lora_request.lora_int_id
        contents: dict[int, int] = {}
        length = prompt_length(new)
        is_token_ids = new.prompt_is_token_ids or [new.prompt_embeds is None] * length
        prompt = list(new.prompt_token_ids or [UNKNOWN] * length)
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
        arrived = LedgerRequest(adapter, prompt, contents, empty, [set() for _ in self.groups])
        # A request that Model Runner V2 gets anew after a preemption has generated tokens already
        arrived.tokens = [*prompt, *(new.prefill_token_ids or ())[length:]]
        return arrived

    def _begin(self, req_id: str, block_ids: Sequence[Sequence[int]], computed: int) -> None:
        """Start a request: blocks of computed tokens are cached ones, all others are empty."""
        request = self.requests[req_id]
        request.begins, request.num_computed_tokens = True, computed
        request.load = self.load_of(request.adapter) if request.adapter else None
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

    def owners(self) -> dict[int, dict[str, bool]]:
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

    def misplaced(
        self,
        what: str,
        block: int,
        expected: object,
        place: int,  # of the block among those of its request
        owners: dict[int, dict[str, bool]] | None = None,  # see `owners`
        *,
        request: str,
        group: int,
        **where: int,  # of `given_allowed`
    ) -> StepCheckError:
        mine = self.requests[request]
        others = [r for r in (owners or self.owners()).get(block, {}) if r != request]
        if block == NULL_BLOCK:
            rule, given = "null block", "the null block"
        elif block in mine.former[group]:
            rule, given = "stale block", f"block {block}, which it had before it was preempted"
        elif others:
            rule, given = "write into another's block", f"block {block} of request {others[0]}"
        elif block in mine.blocks[group]:
            rule, given = "wrong block", f"block {block}, another one of its own"
        elif block in self.freed:
            rule = "write after free"
            given = f"block {block}, which request {self.freed[block]} freed"
        else:
            rule, given = "wrong block", f"block {block}, which no request was given"
        text = f"{what} the request's own block at place {place}"
        return given_allowed(rule, text, given, expected, request=request, group=group, **where)
