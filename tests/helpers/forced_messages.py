"""Forces messages of the full check in steps of an engine, and reads every number in them.

A step of real requests is broken in one way after the other, before it runs: each time the check
has to say what was changed, and what a plain reading of the step, of the oracle or of the
scheduler's words allows there. Then it has to accept the step as it was.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from tests.helpers.engine import runner_of
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.prep.oracle import OracleRequest, oracle_local_requests
from vllm_npu_prep.prep.padding import GraphMode


def ending(
    given: object,
    allowed: object,
    request: str | None = None,
    token: int | None = None,
    group: int | None = None,
) -> str:
    """The end of a message, from the place of the fault on."""
    where = {"request": request, "token": token, "KV-cache group": group}
    place = ", ".join(f"{name} {value}" for name, value in where.items() if value is not None)
    return f": {place}{': ' if place else ''}given {given}, allowed {allowed}"


@dataclass
class At:
    """A step that is about to run."""

    runner: Any
    output: Any  # the scheduler's

    def __post_init__(self) -> None:
        flight = self.runner.in_flight
        self.step, self.device, self.metadata = flight.step, flight.staged.device, flight.metadata
        self.arrays, self.tables = self.step.arrays, self.step.batch.tables
        self.req_ids = list(self.runner.input_batch.req_ids)
        self.told = [self.runner.step_check.ledger.requests[each] for each in self.req_ids]
        self.ends = np.cumsum(self.step.query_lens).tolist()
        self.starts = [0, *self.ends[:-1]]
        self.drafts = self.step.batch.num_draft_tokens[: self.step.num_reqs].tolist()
        shape, drafts = self.tables.shape, self.arrays.draft_token_ids.size > 0
        self.lacks = {
            *(() if shape.states else ("states", "states drafts")),
            *(() if drafts else ("drafts", "states drafts", "async drafts")),
            *(() if shape.latent else ("latent",)),
            *(() if shape.local else ("local",)),
        }

    def builders(self, kind: str) -> list[tuple[int, Any, list[str]]]:
        """Builders of layers that "attend", that see "chunks", or that hold "states"."""
        found = []
        for group, builder, names in self.runner.preparer.builders:
            is_kind = "states" if builder.holds_states else "attend"
            if is_kind == "attend" and builder.attention_chunk_size is not None:
                is_kind = "chunks"
            found += [(group, builder, names)] if is_kind == kind else []
        return found

    def last(self, is_wanted: Callable[[int], bool]) -> int | None:
        """The last row of the batch of a kind, which is not its first one."""
        return next((row for row in range(len(self.told) - 1, 0, -1) if is_wanted(row)), None)


@contextlib.contextmanager
def changed(array: Any, place: Any, value: Any) -> Iterator[None]:
    """Another element in an array, as long as the block runs."""
    right = array[place].item()
    array[place] = value
    yield
    array[place] = right


@contextlib.contextmanager
def given_to(at: At, names: list[str], **fields: Any) -> Iterator[None]:
    """Layers get other metadata."""
    other = {name: replace(at.metadata[name], **fields) for name in names}
    with mock.patch.dict(at.metadata, other):
        yield


Broken = Iterator[str]
CASES: dict[str, tuple[str, str, Callable[[At], Broken]]] = {}


def forces(rule: str, engines: str = "all") -> Callable:
    """Name a generator that breaks a step, yields the end of what is said, and mends the step.

    Where the step has nothing to break in this way, it yields nothing. `engines` says which ones
    have steps that can be broken so.
    """

    def add(case: Callable[[At], Broken]) -> Callable[[At], Broken]:
        CASES[f"{rule} ({len(CASES)})"] = rule, engines, case
        return case

    return add


class Forced:
    """Breaks steps of an engine from now on, in each way once; `names` says in which."""

    def __init__(self, llm: Any) -> None:
        runner = runner_of(llm)
        self.check, self.names = runner.step_check, set[str]()
        self.verify = self.check.verify
        self.check.verify = self._force_all

    def of(self, *engines: str) -> bool:
        """Whether every message was forced that engines of these kinds can have."""
        missing = {name for name, (_, kind, _) in CASES.items() if kind in engines} - self.names
        assert not missing, f"no step could be broken so: {sorted(missing)}"
        return True

    def _force_all(self, runner: Any, output: Any) -> None:
        if runner.in_flight.step.num_reqs:
            for name in [each for each in CASES if each not in self.names]:
                self._force(name, At(runner, output))
        self.verify(runner, output)

    def _force(self, name: str, at: At) -> None:
        rule, engines, case = CASES[name]
        broken = case(at)
        expected = None if engines in at.lacks else next(broken, None)
        if expected is None:
            return
        kept = copy.deepcopy(self.check.ledger), self.check._sent
        said = "nothing"
        try:
            self.verify(at.runner, at.output)
        except StepCheckError as error:
            said = str(error)
        self.check.ledger, self.check._sent = kept
        assert next(broken, None) is None
        assert said.startswith(f'step check "{rule}": ') and "\n" not in said, (name, said)
        assert said.endswith(expected), (name, said, expected)
        self.names.add(name)


@forces("scheduled tokens")
def scheduled_one_more(at):
    name = at.req_ids[-1]
    count = at.output.num_scheduled_tokens[name]
    with mock.patch.dict(at.output.num_scheduled_tokens, {name: count + 1}):
        yield ending(count, count + 1, name)


@forces("layers")
def layer_without_metadata(at):
    names = sorted(at.metadata)
    with mock.patch.dict(at.metadata):
        del at.metadata[names[0]]
        yield ending(names[1:], names)


@forces("input_ids", "sync")
def another_token(at):
    """In the place of what a decode continues from, as the host knows it."""
    row = at.last(lambda row: not at.drafts[row] and at.ends[row] - at.starts[row] == 1)
    if row is None or at.step.batch.num_sampled_rows or at.step.batch.takes_embeds:
        return
    if int(at.step.num_computed_tokens[row]) < len(at.told[row].prompt):
        return  # a prompt's last token, which the ledger knows
    token = at.starts[row]
    right = int(at.tables.token_ids[at.step.slots[row], at.step.num_computed_tokens[row]])
    with changed(at.device.input_ids, token, right ^ 1):
        yield ending(right ^ 1, right, at.req_ids[row], token)


@forces("row of the last step's sample", "async")
def row_of_another_sample(at):
    if not at.step.batch.num_sampled_rows:
        return
    rows = at.step.batch.previous_rows
    row = at.last(lambda row: rows[row] >= 0)
    if row is None:
        return
    right = int(rows[row])
    with changed(rows, row, right + 1):
        yield ending(right + 1, right, at.req_ids[row])


def awaited(at: At, with_drafts: bool) -> int | None:
    """A row whose sample, and perhaps drafts, are on the device only."""
    if not at.step.batch.num_sampled_rows:
        return None
    rows = at.step.batch.previous_rows
    return at.last(lambda row: rows[row] >= 0 and (not with_drafts or at.drafts[row] > 0))


@forces("last step's sample", "async")
def another_sample(at):
    row = awaited(at, with_drafts=False)
    if row is None:
        return
    token = at.ends[row] - 1 - at.drafts[row]
    sampled = at.runner.input_batch.prev_sampled_token_ids
    right = int(sampled[int(at.step.batch.previous_rows[row]), 0])
    with changed(at.device.input_ids, token, right ^ 1):
        yield ending(right ^ 1, right, at.req_ids[row], token)


@forces("last step's drafts", "async drafts")
def another_draft(at):
    row = awaited(at, with_drafts=True)
    if row is None:
        return
    token = at.ends[row] - 1 - at.drafts[row]
    made = at.runner._draft_token_ids[int(at.step.batch.previous_rows[row])].tolist()
    right = [max(each, 0) for each in made[: at.drafts[row]]]
    with changed(at.device.input_ids, token + 1, right[0] ^ 1):
        yield ending([right[0] ^ 1, *right[1:]], right, at.req_ids[row], token)


@forces("discard_request_mask")
def sample_that_counts_discarded(at):
    row = len(at.told) - 1
    known = int(at.tables.num_tokens[at.step.slots[row]])
    right = int(at.step.seq_lens[row]) < known
    with changed(at.arrays.discard_request_mask, row, not right):
        yield ending(not right, right, at.req_ids[row])


@forces("logits_indices")
def logits_of_the_token_before(at):
    """Also in steps in which other requests have several rows of logits."""
    row = at.last(lambda row: at.ends[row] - at.starts[row] > 1 and not at.drafts[row])
    if row is None:
        return
    index = sum(at.drafts[: row + 1]) + row
    with changed(at.arrays.logits_indices, index, at.ends[row] - 2):
        yield ending(at.ends[row] - 2, at.ends[row] - 1, at.req_ids[row])


@forces("length of logits_indices")
def logits_too_few(at):
    right = sum(at.drafts) + len(at.told)
    if right > 1:
        with mock.patch.object(at.step, "num_logits", right - 1):
            yield ending(right - 1, right)


def of_drafts(at: At, name: str, index: int, row: int) -> Broken:
    array = getattr(at.arrays, name)
    right = int(array[index])
    with changed(array, index, right + 1):
        yield ending(right + 1, right, at.req_ids[row])


@forces("target_logits_indices", "drafts")
def logits_of_another_draft(at):
    """Of the last draft; there may be as many as requests, or as tokens."""
    if sum(at.drafts) and at.drafts[0] != 1:
        row = max(row for row, count in enumerate(at.drafts) if count)
        yield from of_drafts(at, "target_logits_indices", sum(at.drafts) - 1, row)


def of_last_drafts(at: At, name: str) -> Broken:
    row = at.last(lambda row: at.drafts[row] > 0)
    if row is not None:
        yield from of_drafts(at, name, row, row)


for array in ("bonus_logits_indices", "cu_num_draft_tokens", "cu_num_sampled_tokens"):
    forces(array, "drafts")(partial(of_last_drafts, name=array))


@forces("states num_prefills", "states")
def one_prefill_more(at):
    threshold, right = at.tables.shape.states.decode_threshold, len(at.told)
    for count in at.step.query_lens:
        if count > threshold:
            break
        right -= 1
    states = at.step.states
    if right < at.step.padding.num_reqs_padded:  # there is room for one more border
        group = at.tables.shape.states.groups[0]
        with mock.patch.object(at.step, "states", replace(states, num_prefills=right + 1)):
            yield ending(right + 1, right, group=group)


def of_states(at: At, name: str, padding: int) -> Broken:
    """Layers with states get other values of a list, by one each."""
    group, _, names = at.builders("states")[0]
    index = at.tables.shape.states.groups.index(group)
    array = getattr(at.step, name)
    right = (array[index] if array.ndim > 1 else array).tolist()
    given = getattr(at.metadata[names[0]], name)
    right = (right + [padding] * len(given))[: len(given)]
    if not right:  # states of tokens, where no request decodes
        return
    with given_to(at, names, **{name: given + 1}):
        yield ending([each + 1 for each in right], right, group=group)


for rule, engines, array, padding in (
    ("state_indices of layers", "states", "state_indices", 0),
    ("initial_state_indices of layers", "states", "initial_state_indices", 0),
    ("accepted tokens of layers", "states drafts", "num_accepted_tokens", 1),
    ("states of tokens", "states drafts", "token_state_indices", 0),
):
    forces(rule, engines)(partial(of_states, name=array, padding=padding))


@forces("has_initial_state of layers", "states")
def layers_that_begin_anew(at):
    group, _, names = at.builders("states")[0]
    given = at.metadata[names[0]].has_initial_state
    right = [computed > 0 for computed in at.step.num_computed_tokens.tolist()]
    right += [False] * (len(given) - len(right))
    with given_to(at, names, has_initial_state=~given):
        yield ending([not each for each in right], right, group=group)


@forces("in a full graph", "states")
def states_in_a_graph(at):
    group, _, names = at.builders("states")[0]
    right = at.step.padding.mode is GraphMode.FULL
    with given_to(at, names, in_full_graph=not right):
        yield ending(not right, right, group=group)


@forces("decodes", "states")
def layers_with_one_decode_more(at):
    group, _, names = at.builders("states")[0]
    right, threshold = 0, at.tables.shape.states.decode_threshold
    while right < len(at.told) and at.step.query_lens[right] <= threshold:
        right += 1
    if at.step.padding.mode is not GraphMode.FULL:
        with given_to(at, names, num_decodes=right + 1):
            yield ending(right + 1, right, group=group)


@forces("latent num_chunks", "latent")
def one_chunk_more(at):
    right = at.step.latent.num_chunks
    with mock.patch.object(at.step, "latent", replace(at.step.latent, num_chunks=right + 1)):
        yield ending(right + 1, right)


@forces("latent context_piece_starts", "latent")
def piece_that_begins_late(at):
    if at.step.latent.num_pieces:
        right = at.step.context_piece_starts.tolist()
        with changed(at.arrays.context_piece_starts, 0, right[0] + 1):
            yield ending([right[0] + 1, *right[1:]], right)


@forces("local block_table", "local")
def chunk_of_another_request(at):
    group = at.tables.shape.local.groups[-1]
    size, chunk = int(at.tables.block_sizes[group]), at.tables.shape.local.attention_chunk_size
    requests = [
        OracleRequest(
            num_computed_tokens=int(computed),
            num_scheduled_tokens=end - start,
            num_prompt_tokens=1,
            token_ids=(),
            block_ids=told.blocks[group],
        )
        for computed, start, end, told in zip(
            at.step.num_computed_tokens, at.starts, at.ends, at.told
        )
    ]
    right = oracle_local_requests(requests, attention_chunk_size=chunk, block_size=size)
    right = right["block_table"]
    if len(right) == 1 or not all(right[-1]) or not all(right[0]):
        return
    rows = at.arrays.chunk_local_table_rows[at.tables.shape.local.groups.index(group)]
    with changed(rows, len(right) - 1, int(rows[0])):
        yield ending([*right[:-1], right[0]], right, group=group)


@forces("device block table", "local")
def block_of_a_virtual_request(at):
    group, _, names = at.builders("chunks")[-1]
    row, other = at.step.local.num_reqs - 1, at.metadata[names[0]].block_tables.clone()
    right, other[row, 0] = int(other[row, 0]), 63
    with given_to(at, names, block_tables=other):
        virtual = f"(virtual request {row})"
        yield f"{virtual}{ending('block 63 at place 0', right, group=group)}"


@forces("padding of layers", "local")
def virtual_request_as_padding(at):
    """Keys that it has computed before are no padding's."""
    group, _, names = at.builders("chunks")[-1]
    given, count = at.metadata[names[0]], at.step.local.num_reqs
    lengths = given.seq_lens_np[count - 1 :].tolist()
    queries = np.diff(given.query_start_loc_np)[count - 1 :].tolist()
    if lengths != queries:
        with given_to(at, names, num_reqs=count - 1):
            yield ending(lengths, queries, group=group)


def of_layers(at: At, right: Any, other: Any, **fields: Any) -> Broken:
    """The first layers that attend get other values."""
    group, _, names = at.builders("attend")[0]
    with given_to(at, names, **fields):
        yield ending(other, right, group=group)


def seen_by(at: At) -> Any:
    """Metadata of the first layers that attend."""
    return at.metadata[at.builders("attend")[0][2][0]]


@forces("dtype of the mask")
def mask_of_another_type(at):
    mask = seen_by(at).attn_mask
    if mask is not None:
        other = mask.double()
        yield from of_layers(at, str(mask.dtype), str(other.dtype), attn_mask=other)


@forces("in a full graph")
def layers_in_a_graph(at):
    right = at.step.padding.mode is GraphMode.FULL
    yield from of_layers(at, right, not right, in_full_graph=not right)


def borders(at: At) -> list[int]:
    """Where queries begin and end, padding included where attention sees it."""
    starts = [0, *at.ends]
    more = len(seen_by(at).query_start_loc_np) - len(starts)
    return starts + at.arrays.query_start_loc[len(starts) : len(starts) + more].tolist()


@forces("queries on the device")
def other_queries_on_the_device(at):
    right = borders(at)
    other = [each + 1 for each in right]
    yield from of_layers(at, right, other, query_start_loc=seen_by(at).query_start_loc + 1)


def moved_border(at: At, place: int) -> tuple[list[int], dict[str, Any]]:
    given, starts = seen_by(at), borders(at)
    starts[place] -= 1
    on_host, on_device = given.query_start_loc_np.copy(), given.query_start_loc.clone()
    on_host[place] -= 1
    on_device[place] -= 1
    return starts, {"query_start_loc_np": on_host, "query_start_loc": on_device}


@forces("queries of layers")
def queries_that_end_early(at):
    starts, fields = moved_border(at, -1)
    yield from of_layers(at, starts[-1] + 1, starts[-1], **fields)


@forces("queries of layers")
def query_one_shorter(at):
    if len(at.told) > 1:
        starts, fields = moved_border(at, 1)
        yield from of_layers(at, borders(at), starts, **fields)


@forces("lengths of layers")
def other_lengths(at):
    given = seen_by(at)
    right = at.step.seq_lens.tolist()
    right += at.arrays.seq_lens[len(right) : len(given.seq_lens_np)].tolist()
    other = [each + 1 for each in right]
    fields = {"seq_lens_np": given.seq_lens_np + 1, "seq_lens": given.seq_lens + 1}
    yield from of_layers(at, right, other, **fields)


@forces("requests of layers")
def one_request_less(at):
    right = len(at.told)
    yield from of_layers(at, right, right - 1, num_reqs=right - 1)


@forces("longest query of layers")
def longer_query(at):
    right = max(at.step.query_lens.tolist())
    yield from of_layers(at, right, right + 1, max_query_len=right + 1)


@forces("null block of padding", "full graphs")
def padding_with_a_block(at):
    given = seen_by(at)
    if given.in_full_graph and len(given.block_tables) > len(at.told):
        other = given.block_tables.clone()
        other[-1, 0] = 5
        yield from of_layers(at, False, True, block_tables=other)
