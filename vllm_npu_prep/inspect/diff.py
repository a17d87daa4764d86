"""What differs between two steps, variable by variable: ``vllm-npu-prep explain A --diff B``.

Requests are matched by their ``req_id``, and tokens by request and position. So a request that
joined or left doesn't make all others differ. Variables that follow from a request's row in the
batch (``req_indices``, ``token_indices``, ``block_table_indices`` and the like) are compared as the
order of the requests.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from vllm_npu_prep.inspect.explain import StepTable, group_level, print_folded, print_line
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.records.contract import (
    DCP_LINES,
    SCALARS,
    STATE_BLOCKS,
    STATE_LINES,
    TOKEN_STATES,
    latent_variables,
    state_variables,
)
from vllm_npu_prep.wording import counted, runs_of

REQUEST_VARIABLES = ("num_computed_tokens", "query_lens", "seq_lens")
SLOT_VARIABLES = ("block_numbers", "block_offsets", "slot_mapping")
SHARED_STATES = [line for line in STATE_LINES if line.name not in (*STATE_BLOCKS, TOKEN_STATES)]
"""Arrays of recurrent states that all groups share."""

COLUMNS = {"step": (), "requests": ("req_id",), "tokens": ("req_id", "positions")}
"""Tables of differences in the terminal, and what names a line beside its variable."""

LISTED = 6
"""Longer lists of values are shortened in the terminal; ``--json`` has all."""


@dataclass(frozen=True)
class Change:
    """A variable that differs between two steps."""

    name: str
    a: Any  # its value in each step, as JSON; None if the step doesn't have it
    b: Any
    req_id: str | None = None  # None: the whole step
    # Of the request's tokens, first and end (excluded); `a` and `b` have a value for each
    positions: tuple[int, int] | None = None
    group: int | None = None  # the KV-cache group

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {k: v for k, v in fields.items() if v is not None or k in ("a", "b")}


def differences(a: StepView, b: StepView) -> list[Change]:
    """Return all differences: first of the steps, then of their requests, then of their tokens."""
    rows_a = {request.req_id: row for row, request in enumerate(a.requests)}
    rows_b = {request.req_id: row for row, request in enumerate(b.requests)}
    both = [name for name in rows_a if name in rows_b]
    found = _changed(_step_level(a), _step_level(b))
    order = [name for name in rows_b if name in rows_a]
    if both != order:
        found.append(Change("order of requests", both, order))
    for group, (own_a, own_b) in enumerate(zip(_groups(a), _groups(b))):
        found += _changed(own_a, own_b, group=group)
    same_sizes = not found
    for name in dict.fromkeys([*rows_a, *rows_b]):
        if name in both:
            request_a, request_b = _request(a, rows_a[name]), _request(b, rows_b[name])
            found += _changed(request_a, request_b, req_id=name)
        else:
            text_a, text_b = _tokens_of(a, rows_a.get(name)), _tokens_of(b, rows_b.get(name))
            found.append(Change("request", text_a, text_b, name))
    if same_sizes and len(found) == 0:
        # These follow from the sizes, so they get a line only if nothing else differs.
        found += _changed(_padding(a) | _plan(a), _padding(b) | _plan(b))
        for group in range(len(a.groups)):
            found += _changed(_virtual(a, group), _virtual(b, group), group=group)
    for name in both:
        found += _token_level(a, b, name, rows_a[name], rows_b[name])
    return found


def _changed(a: dict[str, Any], b: dict[str, Any], **of: Any) -> list[Change]:
    names = dict.fromkeys([*a, *b])
    return [Change(n, a.get(n), b.get(n), **of) for n in names if a.get(n) != b.get(n)]


def _step_level(view: StepView) -> dict[str, Any]:
    step = view.step
    return {
        "attn_state": step.attn_state.name,
        "state_reason": view.state_reason,
        "graph": view.graph,
        "model_input": view.model_input,
        **{name: int(getattr(step, name)) for name in SCALARS},
        "num_reqs_padded": step.padding.num_reqs_padded,
        "max_model_len": step.batch.tables.max_model_len,
        "mrope_dims": len(step.mrope_positions),
        "kv_cache_groups": len(view.groups),
        **{f"latent.{name}": value for name, value in _fields(step.shape.latent).items()},
        **{f"latent.{name}": value for name, value in _fields(step.latent).items()},
        "groups with states": view.state_groups,
        **{f"states.{name}": value for name, value in _fields(step.states).items()},
        **{f"dcp.{name}": value for name, value in _fields(step.shape.dcp).items()},
    }


def _fields(of: Any) -> dict[str, int]:
    """Return the fields of a size of the step or of a setting; none of one that it doesn't have."""
    found = asdict(of) if of else {}
    found.pop("max_model_len", None)  # it has a line of its own
    return found


def _groups(view: StepView) -> list[dict[str, Any]]:
    return [
        {
            "block_size": view.block_size(index),
            "sliding_window": group.sliding_window,
            "attention_chunk_size": group.attention_chunk_size,
            "attn_mask": plan.kind.value,
            "attn_mask shape": None if plan.shape is None else list(plan.shape),
            "mask_reason": view.mask_reason(index),
        }
        for index, (group, plan) in enumerate(zip(view.groups, view.plans))
    ]


def _request(view: StepView, row: int) -> dict[str, Any]:
    step, request = view.step, view.requests[row]
    wanted = step.logits_indices
    start, end = step.query_start_loc[row : row + 2].tolist()
    wanted = wanted[(wanted >= start) & (wanted < end)]
    out: dict[str, Any] = {
        "num_prompt_tokens": request.num_prompt_tokens,
        **{name: int(getattr(step, name)[row]) for name in REQUEST_VARIABLES},
        "num_draft_tokens": int(step.batch.num_draft_tokens[row]),
        "multimodal": [[item.modality, item.offset, item.length] for item in request.items],
        "positions of logits_indices": step.positions[wanted].tolist(),
    }
    for group in view.tables:
        name = f"block_table of group {group}" if len(view.groups) > 1 else "block_table"
        out[name] = view.blocks_owned(row, group).tolist()
    for group in view.state_groups:
        where, own = f"states of group {group}", state_variables(step, group)
        out[f"block_table of {where}"] = np.trim_zeros(step.block_table(group)[row], "b").tolist()
        for name in STATE_BLOCKS:
            out[f"{name} of {where}"] = int(own[name][row])
        if step.shape.states.num_drafts:
            out["num_accepted_tokens"] = int(own["num_accepted_tokens"][row])
    for line in DCP_LINES if step.shape.dcp else ():
        out[line.name] = int(getattr(step, line.name)[row])
    return out


def _tokens_of(view: StepView, row: int | None) -> str | None:
    if row is None:
        return None
    step = view.step
    return (
        f"{counted(int(step.query_lens[row]), 'token')}, {step.num_computed_tokens[row]} computed"
    )


def _padding(view: StepView) -> dict[str, Any]:
    step, arrays = view.step, view.step.arrays
    tokens = slice(step.total_num_scheduled_tokens, step.num_input_tokens)
    requests = slice(step.num_reqs, step.padding.num_reqs_padded)
    out = {
        "input_ids": arrays.input_ids[tokens],
        "positions": arrays.positions[tokens],
        "query_start_loc": arrays.query_start_loc[1:][requests],
        "seq_lens": arrays.seq_lens[requests],
        "num_computed_tokens": arrays.num_computed_tokens[requests],
    }
    for group, slots in enumerate(arrays.slot_mapping):
        out[f"slot_mapping {group}"] = slots[tokens]
    return {f"padding of {name}": values.tolist() for name, values in out.items()}


def _plan(view: StepView) -> dict[str, Any]:
    """Return the plan of latent attention and of recurrent states, which follows from sizes."""
    found = latent_variables(view.step)
    for group in view.state_groups[:1]:
        found |= {line.name: state_variables(view.step, group)[line.name] for line in SHARED_STATES}
    return {name: values.tolist() for name, values in found.items()}


def _virtual(view: StepView, group: int) -> dict[str, Any]:
    if view.groups[group].attention_chunk_size is None:
        return {}
    local = view.step.local_requests(view.tables[group])
    return {f"{name} of virtual requests": values.tolist() for name, values in local.items()}


def _token_level(a: StepView, b: StepView, req_id: str, row_a: int, row_b: int) -> Iterator[Change]:
    """Yield runs of a request's tokens that one step lacks, then what differs in common tokens."""
    positions_a, values_a = _tokens(a, row_a)
    positions_b, values_b = _tokens(b, row_b)
    _, in_a, in_b = np.intersect1d(positions_a, positions_b, return_indices=True)
    for of_a, positions, common in ((True, positions_a, in_a), (False, positions_b, in_b)):
        for run in runs_of(np.delete(positions, common).tolist()):
            text, span = counted(len(run), "token"), (run.start, run.stop)
            a_only, b_only = (text, None) if of_a else (None, text)
            yield Change("tokens", a_only, b_only, req_id, span)
    for name in values_a:
        if name not in values_b:
            continue
        text, _, group = name.partition(" of group ")
        own_a, own_b = values_a[name][in_a], values_b[name][in_b]
        differ = np.flatnonzero(own_a != own_b)
        of_group = int(group) if group else None
        for run in runs_of(positions_a[in_a[differ]].tolist()):  # each makes one line
            chosen, differ = np.split(differ, [len(run)])
            of_a, of_b = own_a[chosen].tolist(), own_b[chosen].tolist()
            yield Change(text, of_a, of_b, req_id, (run.start, run.stop), of_group)


def _tokens(view: StepView, row: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    step = view.step
    own = slice(*step.query_start_loc[row : row + 2].tolist())
    values = {"input_ids": step.input_ids[own]}
    for dim, positions in enumerate(step.mrope_positions):
        values[f"mrope_positions {dim}"] = positions[own]
    if step.shape.dcp:
        values["dcp_ranks"] = step.owners()[own]
    for group in view.state_groups:
        blocks = state_variables(step, group)[TOKEN_STATES]
        if len(blocks):
            values[f"{TOKEN_STATES} of group {group}"] = blocks[own]
    for group in view.tables:
        where = f" of group {group}" if len(view.groups) > 1 else ""
        of_group = group_level(view, group)
        values |= {f"{name}{where}": of_group[name][own] for name in SLOT_VARIABLES}
    return step.positions[own], values


def diff_json(a: StepView, b: StepView, found: list[Change]) -> dict[str, Any]:
    return {"a": a.name, "b": b.name, "differences": [entry.as_json() for entry in found]}


def diff_text(a: StepView, b: StepView, found: list[Change], console: Console) -> None:
    print_line(console, "A  ", a.name)
    print_line(console, "B  ", b.name)
    if not found:
        console.print("no difference")
        return
    rows: dict[str, list[list[object]]] = {title: [] for title in COLUMNS}
    for each in found:
        name = each.name if each.group is None else f"{each.name} of group {each.group}"
        values: list[object] = [name, _short(each.a), _short(each.b)]
        if each.req_id is None:
            rows["step"].append(values)
        elif each.positions is None:
            rows["requests"].append([each.req_id, *values])
        else:
            first, end = each.positions
            rows["tokens"].append([each.req_id, f"{first}:{end}", *values])
    for title, lines in rows.items():
        if lines:
            columns = [*COLUMNS[title], "variable", "A", "B"]
            print_folded(console, StepTable(title, columns, lines))


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, list):
        return str(value)
    if len(value) <= LISTED:
        return " ".join(map(str, value)) or "none"
    head = " ".join(map(str, value[: LISTED - 1]))
    return f"{head} ... {value[-1]} ({len(value)})"
