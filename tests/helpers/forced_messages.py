"""Forces messages of the full check in steps of an engine, and reads every number in them.

A step of real requests is broken in one way after the other, before it runs: each time the check
has to say what was changed, where, and what was there before. Then it accepts the step as it was.
"""

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from tests.helpers.engine import runner_of
from vllm_npu_prep.observe.violation import StepCheckError
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


class Fault(NamedTuple):
    """What breaks a step as long as it is entered, and what is to be said of it."""

    change: contextlib.AbstractContextManager[Any]
    given: object
    allowed: object
    request: str | None = None
    token: int | None = None
    group: int | None = None
    more: str = ""  # after the text of the rule


@contextlib.contextmanager
def changed(array: Any, place: Any, value: Any) -> Iterator[None]:
    """Another element in an array, as long as the block runs."""
    right = array[place].item()
    array[place] = value
    try:
        yield
    finally:
        array[place] = right


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
        self.drafts = self.step.batch.num_draft_tokens[: self.step.num_reqs].tolist()
        shape, drafts = self.tables.shape, self.arrays.draft_token_ids.size > 0
        self.lacks = {
            *(() if shape.states else ("states", "states drafts")),
            *(() if drafts else ("drafts", "states drafts", "async drafts")),
            *(() if shape.latent else ("latent",)),
            *(() if shape.local else ("local",)),
        }

    def last(self, is_wanted: Callable[[int], bool]) -> int | None:
        """The last row of the batch of a kind, which is not its first one."""
        return next((row for row in range(len(self.told) - 1, 0, -1) if is_wanted(row)), None)

    def awaited(self, with_drafts: bool = False) -> int | None:
        """A row whose sample, and perhaps drafts, are on the device only."""
        if not self.step.batch.num_sampled_rows:
            return None
        rows = self.step.batch.previous_rows
        return self.last(lambda row: rows[row] >= 0 and (not with_drafts or self.drafts[row] > 0))

    def element(
        self,
        array: Any,
        place: Any,
        row: int | None,
        token: int | None = None,
        change: Callable[[Any], Any] = lambda right: right + 1,
    ) -> Fault:
        """Another element in an array, of a request."""
        right = array[place].item()
        request = None if row is None else self.req_ids[row]
        other = change(right)
        return Fault(changed(array, place, other), other, right, request, token)

    def token(self, row: int) -> Fault:
        """Another token than the one before a request's drafts, on the device."""
        place = self.ends[row] - 1 - self.drafts[row]
        return self.element(self.device.input_ids, place, row, place, lambda right: right ^ 1)

    def layers(self, kind: str, index: int = 0) -> tuple[int, list[str], Any]:
        """Group, names and metadata of layers that "attend", see "chunks" or hold "states"."""
        found = []
        for group, builder, names in self.runner.preparer.builders:
            is_kind = "states" if builder.holds_states else "attend"
            if is_kind == "attend" and builder.attention_chunk_size is not None:
                is_kind = "chunks"
            found += [(group, names, self.metadata[names[0]])] if is_kind == kind else []
        return found[index]

    def given_to(self, names: list[str], **fields: Any) -> Any:
        """Layers get other metadata."""
        other = {name: replace(self.metadata[name], **fields) for name in names}
        return mock.patch.dict(self.metadata, other)


Case = Callable[[At], Fault | None]
CASES: dict[str, tuple[str, str, Case]] = {}


def forces(rule: str, engines: str = "all") -> Callable[[Case], Case]:
    """Name a function that breaks a step, or returns None where it has nothing to break so.

    `engines` says which ones have steps that can be broken so.
    """

    def add(case: Case) -> Case:
        CASES[f"{rule} ({len(CASES)})"] = rule, engines, case
        return case

    return add


class Forced:
    """Breaks steps of an engine from now on, in each way once."""

    def __init__(self, llm: Any) -> None:
        runner = runner_of(llm)
        self.check = runner.step_check
        self.said: dict[str, tuple[str, str]] = {}  # by case: a message, and what it has to be
        self.verify = self.check.verify
        self.check.verify = self._force_all

    def wrong(self, *engines: str) -> dict[str, tuple[str, str] | None]:
        """Of cases of such engines: messages that are not as they have to be; None if no step could
        be broken so."""
        wanted = [name for name, (_, kind, _) in CASES.items() if kind in engines]
        return {
            name: said
            for name, said in ((name, self.said.get(name)) for name in (*wanted, *self.said))
            if said is None or said[0] != said[1]
        }

    def _force_all(self, runner: Any, output: Any) -> None:
        if runner.in_flight.step.num_reqs:
            at = At(runner, output)
            for name, (rule, engines, case) in CASES.items():
                if name not in self.said and engines not in at.lacks and (fault := case(at)):
                    self.said[name] = self._force(at, rule, fault)
        self.verify(runner, output)

    def _force(self, at: At, rule: str, fault: Fault) -> tuple[str, str]:
        """What is said, without the text of the rule, and what has to be said."""
        kept, said = (copy.deepcopy(self.check.ledger), self.check._sent), "nothing"
        try:
            with fault.change:
                self.verify(at.runner, at.output)
        except StepCheckError as error:
            said = str(error)
        self.check.ledger, self.check._sent = kept
        _, given, allowed, *where, more = fault
        start, end = f'step check "{rule}": ', more + ending(given, allowed, *where)
        is_so = said.startswith(start) and said.endswith(end) and "\n" not in said
        return start + end if is_so else said, start + end


@forces("scheduled tokens")
def scheduled_one_more(at):
    name, counts = at.req_ids[-1], at.output.num_scheduled_tokens
    other = counts[name] + 1
    return Fault(mock.patch.dict(counts, {name: other}), counts[name], other, name)


@forces("layers")
def layer_without_metadata(at):
    names = sorted(at.metadata)
    rest = {name: at.metadata[name] for name in names[1:]}
    return Fault(mock.patch.dict(at.metadata, rest, clear=True), names[1:], names)


@forces("input_ids", "sync")
def another_token(at):
    """In the place of what a decode continues from, as the host knows it."""
    row = at.last(lambda row: not at.drafts[row] and at.step.query_lens[row] == 1)
    if row is None or at.step.batch.num_sampled_rows or at.step.batch.takes_embeds:
        return None
    is_of_prompt = int(at.step.num_computed_tokens[row]) < len(at.told[row].prompt)
    return None if is_of_prompt else at.token(row)  # those of prompts the ledger knows


@forces("row of the last step's sample", "async")
def row_of_another_sample(at):
    row = at.awaited()
    return None if row is None else at.element(at.step.batch.previous_rows, row, row)


@forces("last step's sample", "async")
def another_sample(at):
    row = at.awaited()
    return None if row is None else at.token(row)


@forces("last step's drafts", "async drafts")
def another_draft(at):
    row = at.awaited(with_drafts=True)
    if row is None:
        return None
    sample = at.ends[row] - 1 - at.drafts[row]
    right = at.device.input_ids[sample + 1 : at.ends[row]].tolist()
    other = [right[0] ^ 1, *right[1:]]
    change = changed(at.device.input_ids, sample + 1, other[0])
    return Fault(change, other, right, at.req_ids[row], sample)


@forces("discard_request_mask")
def sample_that_counts_discarded(at):
    row = len(at.told) - 1
    return at.element(at.arrays.discard_request_mask, row, row, change=operator.not_)


@forces("logits_indices")
def logits_of_the_token_before(at):
    """Also in steps in which other requests have several rows of logits."""
    row = at.last(lambda row: at.step.query_lens[row] > 1 and not at.drafts[row])
    if row is None:
        return None
    index = sum(at.drafts[: row + 1]) + row
    return at.element(at.arrays.logits_indices, index, row, change=lambda right: right - 1)


@forces("length of logits_indices")
def logits_too_few(at):
    right = at.step.num_logits
    if right == 1:
        return None
    return Fault(mock.patch.object(at.step, "num_logits", right - 1), right - 1, right)


@forces("target_logits_indices", "drafts")
def logits_of_another_draft(at):
    """Of the last draft; there may be as many as requests, or as tokens."""
    if not sum(at.drafts) or at.drafts[0] == 1:
        return None
    row = max(row for row, count in enumerate(at.drafts) if count)
    return at.element(at.arrays.target_logits_indices, sum(at.drafts) - 1, row)


def of_last_drafts(name: str) -> Case:
    def case(at: At) -> Fault | None:
        row = at.last(lambda row: at.drafts[row] > 0)
        return None if row is None else at.element(getattr(at.arrays, name), row, row)

    return case


for array in ("bonus_logits_indices", "cu_num_draft_tokens", "cu_num_sampled_tokens"):
    forces(array, "drafts")(of_last_drafts(array))


@forces("states num_prefills", "states")
def one_prefill_more(at):
    right, group = at.step.states.num_prefills, at.tables.shape.states.groups[0]
    if right == at.step.padding.num_reqs_padded:  # there is no room for one more border
        return None
    other = replace(at.step.states, num_prefills=right + 1)
    return Fault(mock.patch.object(at.step, "states", other), right + 1, right, group=group)


@forces("latent num_chunks", "latent")
def one_chunk_more(at):
    right = at.step.latent.num_chunks
    other = replace(at.step.latent, num_chunks=right + 1)
    return Fault(mock.patch.object(at.step, "latent", other), right + 1, right)


@forces("latent context_piece_starts", "latent")
def piece_that_begins_late(at):
    if not at.step.latent.num_pieces:
        return None
    right = at.step.context_piece_starts.tolist()
    other = [right[0] + 1, *right[1:]]
    return Fault(changed(at.arrays.context_piece_starts, 0, other[0]), other, right)


@forces("local block_table", "local")
def chunk_of_another_request(at):
    group, _, given = at.layers("chunks", -1)
    right = given.block_tables[: at.step.local.num_reqs].tolist()
    if len(right) == 1 or not all(right[-1]) or not all(right[0]):
        return None
    rows = at.arrays.chunk_local_table_rows[at.tables.shape.local.groups.index(group)]
    change = changed(rows, len(right) - 1, int(rows[0]))
    return Fault(change, [*right[:-1], right[0]], right, group=group)


@forces("device block table", "local")
def block_of_a_virtual_request(at):
    group, names, given = at.layers("chunks", -1)
    row, other = at.step.local.num_reqs - 1, given.block_tables.clone()
    right, other[row, 0] = int(other[row, 0]), 63
    change, more = at.given_to(names, block_tables=other), f" (virtual request {row})"
    return Fault(change, "block 63 at place 0", right, group=group, more=more)


@forces("padding of layers", "local")
def virtual_request_as_padding(at):
    """Keys that it has computed before are no padding's."""
    group, names, given = at.layers("chunks", -1)
    count = at.step.local.num_reqs
    lengths = given.seq_lens_np[count - 1 :].tolist()
    queries = np.diff(given.query_start_loc_np)[count - 1 :].tolist()
    if lengths == queries:
        return None
    return Fault(at.given_to(names, num_reqs=count - 1), lengths, queries, group=group)


def one_more(right: Any) -> Any:
    return right + 1


FIELDS: tuple[tuple[str, str, str, str, Callable[[Any], Any]], ...] = (
    ("in a full graph", "all", "attend", "in_full_graph", operator.not_),
    ("queries on the device", "all", "attend", "query_start_loc", one_more),
    ("requests of layers", "all", "attend", "num_reqs", lambda right: right - 1),
    ("longest query of layers", "all", "attend", "max_query_len", one_more),
    ("in a full graph", "states", "states", "in_full_graph", operator.not_),
    ("state_indices of layers", "states", "states", "state_indices", one_more),
    ("initial_state_indices of layers", "states", "states", "initial_state_indices", one_more),
    ("has_initial_state of layers", "states", "states", "has_initial_state", operator.invert),
    ("accepted tokens of layers", "states drafts", "states", "num_accepted_tokens", one_more),
    ("states of tokens", "states drafts", "states", "token_state_indices", one_more),
)
"""Rule, engines, and a field of what layers of a kind are given, with what it becomes."""


def of_layers(kind: str, name: str, change: Callable[[Any], Any]) -> Case:
    def case(at: At) -> Fault | None:
        group, names, given = at.layers(kind)
        right = getattr(given, name)
        other = change(right)
        said = [each.tolist() if hasattr(each, "tolist") else each for each in (other, right)]
        if said[1] == []:  # states of tokens, where no request decodes
            return None
        return Fault(at.given_to(names, **{name: other}), *said, group=group)

    return case


for rule, engines, kind, name, change in FIELDS:
    forces(rule, engines)(of_layers(kind, name, change))


@forces("decodes", "states")
def layers_with_one_decode_more(at):
    group, names, given = at.layers("states")
    right = given.num_decodes
    if at.step.padding.mode is GraphMode.FULL:
        return None
    return Fault(at.given_to(names, num_decodes=right + 1), right + 1, right, group=group)


@forces("dtype of the mask")
def mask_of_another_type(at):
    group, names, given = at.layers("attend")
    if (mask := given.attn_mask) is None:
        return None
    change = at.given_to(names, attn_mask=mask.double())
    return Fault(change, "torch.float64", str(mask.dtype), group=group)


def moved_border(at: At, place: int) -> tuple[Any, list[int], list[int], int]:
    """Layers whose queries end a token early, on the host and on the device."""
    group, names, given = at.layers("attend")
    fields = {name: getattr(given, name) for name in ("query_start_loc_np", "query_start_loc")}
    copies = {name: copy.deepcopy(values) for name, values in fields.items()}
    for values in copies.values():
        values[place] -= 1
    right, other = (each["query_start_loc_np"].tolist() for each in (fields, copies))
    return at.given_to(names, **copies), other, right, group


@forces("queries of layers")
def queries_that_end_early(at):
    change, other, right, group = moved_border(at, -1)
    return Fault(change, other[-1], right[-1], group=group)


@forces("queries of layers")
def query_one_shorter(at):
    if len(at.told) == 1:
        return None
    change, other, right, group = moved_border(at, 1)
    return Fault(change, other, right, group=group)


@forces("lengths of layers")
def other_lengths(at):
    group, names, given = at.layers("attend")
    right = given.seq_lens_np.tolist()
    fields = {"seq_lens_np": given.seq_lens_np + 1, "seq_lens": given.seq_lens + 1}
    return Fault(at.given_to(names, **fields), [each + 1 for each in right], right, group=group)


@forces("null block of padding", "full graphs")
def padding_with_a_block(at):
    group, names, given = at.layers("attend")
    if not given.in_full_graph or len(given.block_tables) == len(at.told):
        return None
    other = given.block_tables.clone()
    other[-1, 0] = 5
    return Fault(at.given_to(names, block_tables=other), True, False, group=group)
