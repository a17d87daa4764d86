"""Compares a step with what the core and the scalar oracle prepare of it, array by array.

`oracle_arrays` gives the oracle's arrays by a record's names, and `first_difference` finds where a
record differs from such arrays. ``replay``, the full check and tests compare by these two.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_npu_prep.prep.arrays import STEP_ARRAYS, Level
from vllm_npu_prep.prep.choices import wrong_choice
from vllm_npu_prep.prep.oracle import (
    OracleGraphs,
    OracleRequest,
    oracle_latent_step,
    oracle_local_requests,
    oracle_state_step,
    oracle_step,
)
from vllm_npu_prep.prep.oracle_pcp import oracle_pcp_step
from vllm_npu_prep.records.contract import (
    DCP_LINES,
    GROUP_LEVEL,
    LEVELS,
    STATE_BLOCKS,
    TOKEN_STATES,
    prepared_arrays,
)
from vllm_npu_prep.records.record import StepRecord
from vllm_npu_prep.records.settings import LayerGroup
from vllm_npu_prep.records.step_samples import RequestSamples

ORACLE_CELLS = 1 << 20
"""Masks and chunks with at most this many cells are compared cell by cell."""

NOTHING = "nothing"
"""Where a record has no such array."""

Requests = Callable[[int], Sequence[OracleRequest]]
"""Returns the requests of a step with their blocks of a KV-cache group."""


@dataclass(frozen=True)
class Difference:
    """Where a record first differs from the step prepared again."""

    step: int  # its number
    by: str  # ``core`` or ``oracle``, whose preparation differs; ``mask`` for a sample
    variable: str
    index: tuple[int, ...]  # empty for a scalar, or where shapes differ
    req_id: str | None  # None in padding, or if the variable has no requests
    token: int | None  # of the step
    recorded: Any
    expected: Any

    def __str__(self) -> str:
        place = "".join(f"[{index}]" for index in self.index)
        who = [f"token {self.token}"] * (self.token is not None)
        who += [f"request {self.req_id}"] * (self.req_id is not None)
        where = f" ({', '.join(who)})" if who else ""
        by = f"the {self.by}"
        return (
            f"step {self.step}: {self.variable}{place}{where}: recorded {self.recorded}, "
            f"{by} says {self.expected}"
        )


def first_difference(
    record: StepRecord, expected: Mapping[str, np.ndarray], by: str
) -> Difference | None:
    """Compare a record with arrays by its names, in the record's order."""
    for name in expected:
        if name not in record.prepared:
            return Difference(record.number, by, name, (), None, None, NOTHING, "an array")
    for name, recorded in record.prepared.items():
        array = expected.get(name)
        if array is None:
            continue
        if recorded.shape != array.shape:
            shapes = list(recorded.shape), list(array.shape)
            return Difference(record.number, by, f"{name}.shape", (), None, None, *shapes)
        unequal = np.flatnonzero(recorded != array)
        if len(unequal):
            index = tuple(int(i) for i in np.unravel_index(unequal[0], array.shape))
            values = _plain(recorded[index]), _plain(array[index])
            return Difference(record.number, by, name, index, *_owner(record, name, index), *values)
    return None


def sample_difference(record: StepRecord, samples: Sequence[RequestSamples]) -> Difference | None:
    """Find a request with too many samples for its drafts, or a sample that its mask leaves out."""
    drafts = record.batch.num_draft_tokens.tolist()
    for row, of_request in enumerate(samples):
        at = record.number, record.settings.req_ids[row]
        tokens, most = of_request.token_ids, 1 + drafts[row]
        if len(tokens) > most:
            return _of_sample(*at, "core", (row,), f"{len(tokens)} tokens", f"at most {most}")
        if of_request.from_trace:
            continue
        for index, (token, runs) in enumerate(zip(tokens, of_request.kept or ())):
            if not any(first <= token < first + count for first, count in runs):
                size = sum(count for _, count in runs)
                return _of_sample(*at, "mask", (row, index), token, f"one of {size} others")
    return None


def choice_difference(
    record: StepRecord, choices: Mapping[str, np.ndarray], positions: np.ndarray
) -> Difference | None:
    """Find a token whose indexer chose what it must not see, or another number of positions.

    `positions` are those of the step's tokens.
    """
    for layer, chosen in choices.items():
        found = wrong_choice(chosen, positions)
        if found is not None:
            variable, index = f"choices.{layer}", (found.token,)
            req_id, token = _owner(record, "positions", index)
            given, allowed = f"{found.given} ({found.rule})", str(found.allowed)
            return Difference(record.number, "core", variable, index, req_id, token, given, allowed)
    return None


def _of_sample(
    number: int, req_id: str, by: str, index: tuple[int, ...], recorded: object, expected: object
) -> Difference:
    return Difference(number, by, "samples", index, req_id, None, recorded, expected)


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic | np.ndarray) else value
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _owner(record: StepRecord, name: str, index: tuple[int, ...]) -> tuple[str | None, int | None]:
    """Return the request and the token that an element belongs to, by the recorded batch."""
    batch, req_ids = record.batch, record.settings.req_ids
    ends = np.cumsum(batch.num_scheduled_tokens)
    base = name.rpartition(".")[2].removesuffix("_padded")
    token = req = None
    if "local" in name or not index:
        return None, None
    level = LEVELS.get(base)
    if level is Level.TOKEN:
        token = index[-1]
    elif level is Level.REQUEST:
        line = STEP_ARRAYS.get(base)
        req = max(0, index[0] - (line is not None and line.has_borders))
    elif level is not None:
        rows = batch.num_draft_tokens + (level is Level.LOGIT)
        req = int(np.searchsorted(np.cumsum(rows), index[0], side="right"))
    elif "attn_mask." in name and base != "shape" and _has_row_for_each_token(record, name):
        token = index[0]
    if token is not None:
        if token >= ends[-1]:
            return None, None  # padding
        req = int(np.searchsorted(ends, token, side="right"))
    if req is None or req >= len(req_ids):
        return None, token
    return req_ids[req], token


def _has_row_for_each_token(record: StepRecord, name: str) -> bool:
    shape = record.prepared.get(f"{name.rpartition('.')[0]}.shape")
    tokens = record.settings.num_input_tokens
    state = record.prepared.get("attn_state")
    is_matrix = state is not None and state.tobytes() == b"PrefillNoCache"
    return shape is not None and shape.size == 2 and int(shape[0]) == tokens and not is_matrix


def core_difference(record: StepRecord) -> Difference | None:
    """Return the first difference from what the core prepares now; None if there is none."""
    expected = prepared_arrays(record.prepare(), record.settings)
    for name in record.prepared:
        if name not in expected:
            return Difference(record.number, "core", name, (), None, None, "an array", "none")
    return first_difference(record, expected, "core")


def oracle_difference(record: StepRecord) -> Difference | None:
    """Return the first difference from what the oracle prepares; None if there is none."""
    for _, expected in oracle_arrays(record, lambda group: oracle_requests(record, group)):
        found = first_difference(record, expected, "oracle")
        if found is not None:
            return found
    return None


def oracle_arrays(
    record: StepRecord,
    requests: Requests,  # what the oracle prepares
    most_cells: int = ORACLE_CELLS,  # larger masks and chunks are not compared cell by cell
) -> Iterator[tuple[LayerGroup, dict[str, np.ndarray]]]:
    """Yield the oracle's arrays by a record's names, for each group of layers.

    Values that the oracle can't know are as recorded.
    """
    settings = record.settings
    for index, (group, prefix) in enumerate(zip(settings.groups, settings.group_prefixes)):
        where = "" if index == settings.main_group else prefix
        own = requests(group.group)
        if group.holds_states:
            yield group, _of_states(record, group, where, own)
        else:
            yield group, _of_attention(record, group, where, own, most_cells)


class KnownTokens(Sequence[int]):
    """The tokens of a request, as far as a record knows them; the others are 0."""

    def __init__(self, length: int, known: dict[int, int]) -> None:
        self.length, self.known = length, known

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.known.get(index if index >= 0 else index + self.length, 0)


def oracle_requests(
    record: StepRecord,
    group: int,
    owned: Sequence[Sequence[int]] | None = None,  # the blocks of each request; None: as recorded
) -> list[OracleRequest]:
    """Return the requests of a record in plain Python values, with their blocks of one group."""

    settings, batch = record.settings, record.batch
    num_columns = 1
    blocks = [[0]] * settings.num_reqs
    if group < len(settings.block_sizes):
        size = settings.shape.dcp.tokens_per_block(settings.block_sizes[group])
        num_columns = -(-settings.max_model_len // size)
        states = settings.shape.states
        if group in states.groups:
            num_columns += states.num_drafts  # each draft has a state of its own
        if owned is None:
            first = int(batch.num_blocks[:group].sum())
            ends = first + np.cumsum(batch.num_blocks[group])
            starts = ends - batch.num_blocks[group]
            owned = [batch.block_ids[a:b].tolist() for a, b in zip(starts, ends)]
        blocks = [list(ids[:num_columns]) for ids in owned]
    requests, start = [], 0
    accepted = batch.num_accepted_tokens.tolist() or [1] * settings.num_reqs
    counts = batch.num_computed_tokens, batch.num_scheduled_tokens, batch.num_tokens
    columns = (each.tolist() for each in (*counts, batch.num_draft_tokens, batch.num_prompt_tokens))
    for req, (computed, scheduled, num_tokens, drafts, prompt) in enumerate(zip(*columns)):
        span = batch.token_ids[start : start + scheduled].tolist()
        known = dict(enumerate(span, computed))
        if len(batch.next_token_ids):
            # -1 stands for a sample that is still on the device: the core makes it token 0
            behind = min(computed + scheduled, num_tokens - 1)
            known[behind] = max(0, int(batch.next_token_ids[req]))
        mrope: list[Sequence[int]] = []
        length = int(batch.mrope_lengths[req]) if settings.mrope_dims else 0
        if length:
            seen = max(0, min(length - computed, scheduled))
            rows = batch.mrope_positions[:, start : start + seen].tolist()
            mrope = [KnownTokens(length, dict(enumerate(row, computed))) for row in rows]
        requests.append(
            OracleRequest(
                num_computed_tokens=computed,
                num_scheduled_tokens=scheduled,
                num_prompt_tokens=prompt,
                token_ids=KnownTokens(max(num_tokens, computed + scheduled - drafts), known),
                block_ids=blocks[req],
                num_draft_tokens=drafts,
                draft_token_ids=span[scheduled - drafts :],
                num_accepted_tokens=accepted[req],
                mrope_positions=mrope,
                mrope_position_delta=int(batch.mrope_position_deltas[req])
                if settings.mrope_dims
                else 0,
            )
        )
        start += scheduled
    return requests


def _of_attention(
    record: StepRecord,
    group: LayerGroup,
    prefix: str,
    requests: Sequence[OracleRequest],
    most_cells: int,
) -> dict[str, np.ndarray]:
    settings = record.settings
    has_table = group.group < len(settings.block_sizes)
    block_size = settings.block_sizes[group.group] if has_table else settings.max_model_len
    sizes, total = settings.num_input_tokens, settings.total_num_scheduled_tokens
    dcp = settings.dcp
    padding: dict[str, Any] = {"capture_sizes": [sizes]}
    if settings.pcp is not None:  # rows of ranks are padded, requests are not
        padding = {"graphs": OracleGraphs("PIECEWISE", [sizes], settings.num_reqs)}
    elif settings.mode == "FULL":
        query_len, rows = settings.decode_query_len, settings.num_reqs_padded
        mode, rows = ("FULL_DECODE_ONLY", rows) if query_len else ("FULL", rows - 1)
        padding = {"graphs": OracleGraphs(mode, [sizes], rows, max(1, query_len))}
    elif settings.num_reqs_padded == settings.num_reqs:
        padding = {"graphs": OracleGraphs("PIECEWISE", [sizes], settings.num_reqs)}
    longest = int((record.batch.num_computed_tokens + record.batch.num_scheduled_tokens).max())
    is_small = max(longest, sizes) * longest <= most_cells
    said = oracle_step(
        requests,
        block_size=block_size,
        max_model_len=settings.max_model_len,
        mask="compressed" if settings.mask == "compressed" or not is_small else "dense",
        sliding_window=group.sliding_window,
        chunked_prefill=settings.chunked_prefill,
        speculation=settings.max_drafts > 0,
        mrope_dims=settings.mrope_dims,
        dcp=None if dcp is None else (dcp.world_size, dcp.rank, dcp.interleave_size),
        **padding,
    )
    of_ranks: dict[str, np.ndarray] = {}
    if settings.pcp is not None:
        of_ranks = _of_ranks(record, prefix, said)
        # Tokens of other ranks are found in the cache, as those of earlier steps are
        has_several = said["max_query_len"] > 1
        said["attn_state"] = "ChunkedPrefill" if has_several else "DecodeOnly"
        said["attn_mask"] = "compressed"  # its rows are those of a rank's tokens
    mask = said.pop("attn_mask")
    said.pop("runtime_mode", None)
    state = said.pop("attn_state")
    out = of_ranks | ({} if prefix else {"attn_state": np.array(state, "S")})
    if dcp is not None:
        ranks = said.pop("dcp_ranks")
        if not prefix:
            lens = {line.name: said.pop(line.name) for line in DCP_LINES}
            out |= {f"dcp.{name}": np.array(value) for name, value in lens.items()}
            for name, value in lens.items():
                out[f"{name}_padded"] = _with_rest(record, f"{name}_padded", value)
            out["dcp.dcp_ranks"] = np.array(ranks)
    for name, values in said.items():
        base = name.removesuffix("_padded")
        if base in GROUP_LEVEL:
            if has_table:
                out[f"{prefix}{name}"] = np.array(values)
        elif prefix:
            continue  # the same for all groups
        elif name in STEP_ARRAYS and not STEP_ARRAYS[name].shown:
            name = STEP_ARRAYS[name].recorded_as  # records have it with padding only
            out[name] = _with_rest(record, name, values)
        else:
            out[name] = np.array(values)
    if not prefix:
        _leave_out_samples(record, out, total)
        if (latent := settings.latent) is not None:
            attending = requests if settings.pcp is None else _rows_of_rank(out)
            said = oracle_latent_step(
                attending,
                decode_threshold=latent.decode_threshold,
                workspace_tokens=latent.workspace_tokens,
                block_size=latent.block_size,
            )
            out |= _named(record, "latent", said)
    if group.attention_chunk_size is not None:
        if total * group.attention_chunk_size <= most_cells:
            local = oracle_local_requests(
                requests, attention_chunk_size=group.attention_chunk_size, block_size=block_size
            )
            del local["visible"]
            where = settings.group_prefixes[settings.groups.index(group)]
            out |= {f"{where}local_requests.{n}": np.array(v) for n, v in local.items()}
    elif group.causal:
        if mask is None:
            out[f"{prefix}attn_mask.shape"] = np.empty(0, np.int64)
        elif f"{prefix}attn_mask.masked" in record.prepared and mask != "compressed":
            out[f"{prefix}attn_mask.masked"] = np.array(mask, bool)
    return out


def _of_ranks(record: StepRecord, prefix: str, step: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return what the oracle says of the share of one rank, by a record's names."""
    settings, pcp = record.settings, record.settings.pcp
    assert pcp is not None
    said = oracle_pcp_step(
        step,
        ranks=pcp.world_size,
        rank=pcp.rank,
        rank_tokens=settings.num_input_tokens // pcp.world_size,
        max_num_reqs=settings.max_num_reqs,
    )
    slots = {f"{prefix}pcp_slot_mapping_padded": np.array(said.pop("pcp_slot_mapping"))}
    if prefix:
        return slots
    ranks = np.array(said.pop("pcp_ranks"))
    return slots | {"pcp.pcp_ranks": ranks} | _named(record, "pcp", said)


def _rows_of_rank(of_rank: Mapping[str, np.ndarray]) -> list[OracleRequest]:
    """Return the rows of a rank as requests, which latent attention splits."""
    num_rows = int(of_rank["pcp.num_rows"])
    starts = of_rank["pcp_query_start_loc_padded"][: num_rows + 1]
    computed = of_rank["pcp_num_computed_tokens_padded"][:num_rows]
    sizes = zip(computed.tolist(), np.diff(starts).tolist())
    return [OracleRequest(before, count, 0, (), ()) for before, count in sizes]


def _of_states(
    record: StepRecord, group: LayerGroup, prefix: str, requests: Sequence[OracleRequest]
) -> dict[str, np.ndarray]:
    settings = record.settings
    states = settings.shape.states
    said = oracle_state_step(
        requests,
        decode_threshold=states.decode_threshold,
        block_size=settings.block_sizes[group.group],
        num_drafts=states.num_drafts,
    )
    tokens, kept = said.pop(TOKEN_STATES), said.pop("num_accepted_tokens")
    out = {f"{prefix}{name}": np.array(said.pop(name)) for name in STATE_BLOCKS}
    out[f"{prefix}slot_mapping"] = np.full(settings.total_num_scheduled_tokens, -1)
    out |= _named(record, "states", said)
    if states.num_drafts:
        counts = np.ones(settings.num_reqs_padded, np.int64)
        counts[: len(kept)] = kept
        out["num_accepted_tokens_padded"] = counts
        of_groups = np.zeros((len(states.groups), settings.num_input_tokens), np.int64)
        recorded = record.prepared.get(f"{TOKEN_STATES}_padded")
        if recorded is not None and recorded.shape == of_groups.shape:
            of_groups[:] = recorded  # the rows of other groups
        own = of_groups[states.groups.index(group.group)]
        own[:] = 0
        own[: len(tokens)] = tokens
        out[f"{TOKEN_STATES}_padded"] = of_groups
    return out


def _named(record: StepRecord, prefix: str, said: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return what the oracle says of a part of the step, by a record's names."""
    out = {}
    for name, value in said.items():
        if isinstance(value, int):
            out[f"{prefix}.{name}"] = np.array(value)
        else:
            out[f"{name}_padded"] = _with_rest(record, f"{name}_padded", value)
    return out


def _with_rest(record: StepRecord, name: str, values: list[int]) -> np.ndarray:
    """Return the values, padded with 0 to the recorded length."""
    recorded = record.prepared.get(name)
    out = np.zeros(max(len(values), 0 if recorded is None else recorded.size), np.int64)
    out[: len(values)] = values
    return out


def _leave_out_samples(record: StepRecord, out: dict[str, np.ndarray], total: int) -> None:
    """Take the ids as recorded that only the device has; which tokens these are is checked.

    There are such tokens with asynchronous scheduling, and with speculation on V2.
    """
    settings, batch = record.settings, record.batch
    if not settings.num_sampled_rows:
        return
    on_device = np.zeros(total, np.bool_)
    drafts_on_device, start, first_draft = [], 0, 0
    for req, row in enumerate(batch.previous_rows.tolist()):
        end = start + int(batch.num_scheduled_tokens[req])
        drafts = int(batch.num_draft_tokens[req])
        if row >= 0:
            on_device[end - 1 - drafts] = True
            for draft in range(min(drafts, settings.num_sampled_drafts)):
                on_device[end - drafts + draft] = True
                drafts_on_device.append(first_draft + draft)
        start, first_draft = end, first_draft + drafts
    out["is_on_device"] = on_device
    own = np.zeros(0, np.int64)  # the rank's tokens, which are in the order of the batch
    if settings.pcp is not None:
        own = np.flatnonzero(out["pcp.pcp_ranks"] == settings.pcp.rank)
    for name, places in (
        ("pcp_input_ids_padded", np.flatnonzero(on_device[own])),
        ("input_ids", np.flatnonzero(on_device)),
        ("input_ids_padded", np.flatnonzero(on_device)),
        ("draft_token_ids_padded", np.array(drafts_on_device, np.int64)),
    ):
        recorded = record.prepared.get(name)
        if name in out and recorded is not None and recorded.shape == out[name].shape:
            out[name][places] = recorded[places]
