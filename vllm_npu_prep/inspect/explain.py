"""``vllm-npu-prep explain``: one step, why it is as it is, and every variable by level."""

import textwrap
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.mask import MaskForm, MaskKind, MaskPlan, build_mask

FULL_MASK_CELLS = 4096
"""Masks up to this many cells are shown cell by cell, larger ones by their first masked column."""

FOLDED_TOKENS = 400
FOLDED_REQUESTS = 64
"""Tables longer than these are folded in the terminal; ``--json`` always has all."""

TOKEN_LEVEL = (
    "req_indices",
    "query_pos",
    "positions",
    "token_indices",
    "input_ids",
    "block_table_indices",
    "block_numbers",
    "block_offsets",
    "slot_mapping",
)
REQUEST_LEVEL = ("query_lens", "cu_num_tokens", "seq_lens", "num_computed_tokens")


GROUP_LEVEL = ("block_table_indices", "block_numbers", "block_offsets", "slot_mapping")
"""Token-level variables that each KV-cache group has of its own."""


def token_level(step: PreparedStep, group: int = 0) -> dict[str, np.ndarray]:
    """Token-level variables by name, each ``[total_num_scheduled_tokens]``."""
    variables = {}
    for name in TOKEN_LEVEL:
        value = getattr(step, name)
        variables[name] = value(group) if callable(value) else value
    return variables


def explain_json(view: StepView) -> dict[str, Any]:
    """Every variable of the step, by exactly the keys of the JSON contract."""
    step = view.step
    out: dict[str, Any] = {name: value.tolist() for name, value in token_level(step).items()}
    for name in (*REQUEST_LEVEL, "query_start_loc", "logits_indices"):
        out[name] = getattr(step, name).tolist()
    out["block_table"] = step.block_table().tolist()
    out["total_num_scheduled_tokens"] = step.total_num_scheduled_tokens
    out["num_input_tokens"] = step.num_input_tokens
    out["num_reqs"] = step.num_reqs
    out["max_query_len"] = step.max_query_len
    out["max_seq_len"] = step.max_seq_len
    out["attn_state"] = step.attn_state.name
    out["attn_mask"] = _mask_json(view.groups[0].plan, step.positions)
    if view.padded:
        out["num_reqs_padded"] = step.padding.num_reqs_padded
        for name in ("input_ids", "positions", "query_start_loc", "seq_lens"):
            out[f"{name}_padded"] = getattr(step.arrays, name).tolist()
        out["slot_mapping_padded"] = step.arrays.slot_mapping[0].tolist()
    if len(view.groups) > 1 or view.groups[0].attention_chunk_size:
        out["kv_cache_groups"] = [_group_json(view, index) for index in range(len(view.groups))]
    if len(step.mrope_positions):
        out["mrope_positions"] = step.mrope_positions.tolist()
    if any(request.items for request in view.requests):
        out["model_input"] = view.model_input
        out["multimodal"] = view.spans()
    return out


def _group_json(view: StepView, index: int) -> dict[str, Any]:
    """What a KV-cache group has of its own."""
    step, group = view.step, view.groups[index]
    out = {
        "block_size": group.block_size,
        "sliding_window": group.sliding_window,
        "attention_chunk_size": group.attention_chunk_size,
        "block_table": step.block_table(index).tolist(),
        **{name: getattr(step, name)(index).tolist() for name in GROUP_LEVEL},
        "attn_mask": _mask_json(group.plan, step.positions),
    }
    if group.attention_chunk_size is not None:
        local = step.local_requests(index).items()
        out["local_requests"] = {name: value.tolist() for name, value in local}
    return out


def _mask_json(plan: MaskPlan, positions: np.ndarray) -> dict[str, Any] | None:
    if plan.shape is None:
        return None
    shape = list(plan.shape)
    if plan.kind == MaskKind.COMPRESSED:
        return {"form": MaskForm.COMPRESSED.value, "shape": shape}
    num_rows, max_seq_len = plan.shape
    if num_rows * max_seq_len <= FULL_MASK_CELLS:
        mask = build_mask(plan, positions)
        assert mask is not None
        return {"shape": shape, "masked": mask.astype(int).tolist()}
    rows = np.arange(max_seq_len) if plan.kind == MaskKind.MATRIX else positions
    if plan.kind == MaskKind.ROWS and plan.attention_chunk_size is not None:
        rows = positions % plan.attention_chunk_size
    padding = np.full(num_rows - len(rows), max_seq_len)
    first_masked = np.concatenate([np.minimum(rows + 1, max_seq_len), padding])
    out = {"shape": shape, "first_masked_position_by_row": first_masked.tolist()}
    if plan.sliding_window is not None:
        first_visible = np.maximum(rows + 1 - plan.sliding_window, 0)
        out["first_visible_position_by_row"] = [*first_visible.tolist(), *(0 * padding).tolist()]
    return out


def explain_text(
    view: StepView,
    console: Console,
    req_id: str | None = None,
    tokens: tuple[int, int] | None = None,
) -> None:
    """Print the step: state, masks, graph and padding with their reasons, then requests and tokens.

    Parameters
    ----------
    view
        The step.
    console
        Where to.
    req_id
        The one request whose lines and tokens are shown; None: all, folded if there are many.
    tokens
        The tokens that are shown, from the first to behind the last.

    Raises
    ------
    PrepError
        If there is no such request, or no such token.
    """
    step, groups = view.step, view.groups
    chosen = _choose(view, req_id)
    _print_summary(view, console)

    starts, several = step.query_start_loc, len(groups) > 1
    rows: list[list[object]] = []
    for row in chosen:
        own = step.logits_indices
        own = own[(own >= starts[row]) & (own < starts[row + 1])]
        values = (getattr(step, name)[row] for name in REQUEST_LEVEL)
        touched = [_list(view.blocks_touched(row, group)) for group in range(len(groups))]
        span = f"{starts[row]}:{starts[row + 1]}"
        logits = ", ".join(map(str, own))
        rows.append([view.requests[row].req_id, *values, span, logits, "; ".join(touched)])
    columns = ["req_id", *REQUEST_LEVEL, "query_start_loc", "logits_indices", "blocks_written"]
    _print_folded(console, "request level", columns, rows, FOLDED_REQUESTS)

    spans = [span for span in view.spans() if req_id in (None, span["req_id"])]
    if spans:
        items = [[*list(span.values())[:4], _span(span["tokens"])] for span in spans]
        columns = ["req_id", "modality", "offset", "length", "tokens"]
        _print_folded(console, "images and videos", columns, items, FOLDED_REQUESTS)

    variables = token_level(step)
    for dim, positions in enumerate(step.mrope_positions):
        variables[f"mrope_positions {dim}"] = positions
    for index in range(1, len(groups)):
        variables |= {f"{name} {index}": getattr(step, name)(index) for name in GROUP_LEVEL[1:]}
    first, end = tokens or (0, step.total_num_scheduled_tokens)
    if not 0 <= first < end <= step.total_num_scheduled_tokens:
        raise PrepError(
            f"--tokens {first}:{end}: the step has tokens 0:{step.total_num_scheduled_tokens}"
        )
    shown = [t for t in range(first, end) if req_id is None or step.req_indices[t] in chosen]
    rows = [[token, *(value[token] for value in variables.values())] for token in shown]
    _print_folded(console, "token level", ["token", *variables], rows, FOLDED_TOKENS)

    for index, group in enumerate(groups):
        rows = [[view.requests[r].req_id, _list(view.blocks_owned(r, index))] for r in chosen]
        title = "system level"
        if several:
            title += f", group {index} (block size {group.block_size})"
        _print_folded(console, title, ["req_id", "block_table"], rows, FOLDED_REQUESTS)
        if group.attention_chunk_size is not None and req_id is None:
            _print_local(console, title, step.local_requests(index))


def _choose(view: StepView, req_id: str | None) -> list[int]:
    """Rows of the batch to show."""
    rows = list(range(len(view.requests)))
    if req_id is None:
        return rows
    chosen = [row for row in rows if view.requests[row].req_id == req_id]
    if not chosen:
        names = ", ".join(request.req_id for request in view.requests[:10])
        raise PrepError(f"--request {req_id}: no such request; there are {names}")
    return chosen


def _print_summary(view: StepView, console: Console) -> None:
    """Which state, mask, graph and how much padding, and why."""
    step, padding = view.step, view.step.padding
    lines = [f"state   {step.attn_state.name}: {view.state_reason}"]
    for index, group in enumerate(view.groups):
        plan = group.plan
        mask = "none" if plan.shape is None else f"{plan.kind.value} {list(plan.shape)}"
        size = f", {group.mask_bytes:,} bytes" if plan.shape else ""
        where = f"group {index}: " if len(view.groups) > 1 else ""
        lines.append(f"mask    {where}{mask}{size}: {view.mask_reason(index)}")
    tokens = step.num_input_tokens - step.total_num_scheduled_tokens
    requests = padding.num_reqs_padded - step.num_reqs
    lines += [
        f"graph   {view.graph}",
        f"padding {tokens} tokens, {requests} requests",
        f"input   {view.model_input}",
        f"sizes   {step.num_reqs} requests, {step.total_num_scheduled_tokens} tokens, "
        f"num_input_tokens {step.num_input_tokens}, max_query_len {step.max_query_len}, "
        f"max_seq_len {step.max_seq_len}",
    ]
    console.print(view.name, style="bold", markup=False)
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _print_local(console: Console, title: str, local: dict[str, np.ndarray]) -> None:
    """Virtual requests: what a group with chunked local attention sees of the step."""
    starts = local["query_start_loc"].tolist()
    rows: list[list[object]] = [
        [f"{start}:{end}", length, computed, " ".join(map(str, blocks))]
        for start, end, length, computed, blocks in zip(
            starts,
            starts[1:],
            local["seq_lens"],
            local["num_computed_tokens"],
            local["block_table"].tolist(),
        )
    ]
    names = ["query_start_loc", "seq_lens", "num_computed_tokens", "block_table"]
    _print_folded(console, f"{title}: virtual requests", names, rows, FOLDED_REQUESTS)


def _list(blocks: np.ndarray) -> str:
    return " ".join(map(str, blocks.tolist()))


def _print_folded(
    console: Console, title: str, columns: list[str], rows: list[list[object]], most: int
) -> None:
    """A table whose middle is left out where it is longer than `most`."""
    folded = len(rows) - most
    if folded > 0:
        rows = rows[: most // 2] + rows[-(most - most // 2) :]
    _print_table(console, title, columns, rows)
    if folded > 0:
        console.print(f"{folded} lines in the middle are folded; --json has them all")


def _span(tokens: list[int] | None) -> str:
    return "-" if tokens is None else f"{tokens[0]}:{tokens[1]}"


def _print_table(
    console: Console, title: str, columns: list[str], rows: list[list[object]]
) -> None:
    console.print(f"\n[bold]{title}[/bold]")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for name in columns:
        # Narrow columns of numbers under long names: break names where they have joints.
        header = "\n".join(textwrap.wrap(name.replace("_", "_ "), 9)).replace("_ ", "_")
        table.add_column(header, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print(table)
