"""``vllm-npu-prep explain``: a scenario's step, every variable by level."""

import textwrap
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_npu_prep.inspect.scenario import Scenario, ScenarioGroup, scenario_batch
from vllm_npu_prep.prep.batch import PreparedStep, prepare_step
from vllm_npu_prep.prep.mask import MaskForm, MaskKind, MaskPlan, build_mask, plan_mask

FULL_MASK_CELLS = 4096
"""Masks up to this many cells are shown cell by cell, larger ones by their first masked column."""

FOLDED_TOKENS = 400
"""Token tables longer than this are folded in the terminal; ``--json`` always has all."""

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


def prepare_scenario(scenario: Scenario) -> tuple[PreparedStep, list[MaskPlan]]:
    """Prepare a scenario's step and plan the mask of each KV-cache group."""
    step = prepare_step(*scenario_batch(scenario))
    plans = [
        plan_mask(
            step.attn_state,
            MaskForm(scenario.mask),
            step.num_input_tokens,
            _max_seq_len(step, group),
            sliding_window=group.sliding_window,
            attention_chunk_size=group.attention_chunk_size,
        )
        for group in scenario.groups
    ]
    return step, plans


def _max_seq_len(step: PreparedStep, group: ScenarioGroup) -> int:
    """Longest sequence that the group's layers see: of a chunk, where they see chunks."""
    if group.attention_chunk_size is None:
        return step.max_seq_len
    assert step.local is not None
    return step.local.max_seq_len


def token_level(step: PreparedStep, group: int = 0) -> dict[str, np.ndarray]:
    """Token-level variables by name, each ``[total_num_scheduled_tokens]``."""
    variables = {}
    for name in TOKEN_LEVEL:
        value = getattr(step, name)
        variables[name] = value(group) if callable(value) else value
    return variables


def explain_json(scenario: Scenario) -> dict[str, Any]:
    """Every variable of the step, by exactly the keys of the JSON contract."""
    step, plans = prepare_scenario(scenario)
    plan = plans[0]
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
    out["attn_mask"] = _mask_json(plan, step.positions)
    if scenario.capture_sizes:
        out["num_reqs_padded"] = step.padding.num_reqs_padded
        for name in ("input_ids", "positions", "query_start_loc", "seq_lens"):
            out[f"{name}_padded"] = getattr(step.arrays, name).tolist()
        out["slot_mapping_padded"] = step.arrays.slot_mapping[0].tolist()
    if scenario.more_kv_cache_groups or scenario.attention_chunk_size:
        out["kv_cache_groups"] = [
            _group_json(scenario, step, index, plan) for index, plan in enumerate(plans)
        ]
    if scenario.mrope_dims:
        out["mrope_positions"] = step.mrope_positions.tolist()
    if any(request.multimodal for request in scenario.requests):
        out["model_input"] = _model_input(step)
        out["multimodal"] = modality_spans(scenario, step)
    return out


def _group_json(
    scenario: Scenario, step: PreparedStep, index: int, plan: MaskPlan
) -> dict[str, Any]:
    """What a KV-cache group has of its own."""
    group = scenario.groups[index]
    out = {
        "block_size": group.block_size,
        "sliding_window": group.sliding_window,
        "attention_chunk_size": group.attention_chunk_size,
        "block_table": step.block_table(index).tolist(),
        **{name: getattr(step, name)(index).tolist() for name in GROUP_LEVEL},
        "attn_mask": _mask_json(plan, step.positions),
    }
    if group.attention_chunk_size is not None:
        local = step.local_requests(index).items()
        out["local_requests"] = {name: value.tolist() for name, value in local}
    return out


def _model_input(step: PreparedStep) -> str:
    """Which of the two inputs the model gets (`vllm_npu_prep.prep.embeds`)."""
    return "inputs_embeds" if step.batch.takes_embeds else "input_ids"


def modality_spans(scenario: Scenario, step: PreparedStep) -> list[dict[str, Any]]:
    """Images and videos of all requests, and which of their tokens the step computes.

    ``tokens`` are the step's, from the first to behind the last; None if it computes none, because
    the item is in the KV cache already or comes later.
    """
    spans = []
    for row, request in enumerate(scenario.requests):
        first, start = request.num_computed_tokens, int(step.query_start_loc[row])
        for item in request.multimodal:
            seen = max(item.offset, first), min(item.end, request.seq_len)
            tokens = [start + position - first for position in seen]
            spans.append(
                {
                    "req_id": request.req_id,
                    "modality": item.modality,
                    "offset": item.offset,
                    "length": item.length,
                    "tokens": tokens if seen[0] < seen[1] else None,
                }
            )
    return spans


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


def explain_text(scenario: Scenario, console: Console) -> None:
    """Print the step: what it is, then each level as a table."""
    step, plans = prepare_scenario(scenario)
    groups = scenario.groups
    padded = step.num_input_tokens - step.total_num_scheduled_tokens
    console.print(scenario.name or "scenario", style="bold", markup=False)
    console.print(f"state   {step.attn_state.name}")
    for index, (group, plan) in enumerate(zip(groups, plans)):
        mask = "none" if plan.shape is None else f"{plan.kind.value} {list(plan.shape)}"
        window = f", window {group.sliding_window}" if group.sliding_window else ""
        if group.attention_chunk_size:
            window = f", chunks of {group.attention_chunk_size}"
        where = f" (group {index})" if len(groups) > 1 else ""
        console.print(f"mask    {mask}{window}{where}", highlight=False)
    console.print(f"input   {_model_input(step)}", highlight=False)
    console.print(
        f"sizes   {step.num_reqs} requests, {step.total_num_scheduled_tokens} tokens, "
        f"num_input_tokens {step.num_input_tokens} ({padded} of padding), "
        f"max_query_len {step.max_query_len}, max_seq_len {step.max_seq_len}",
        highlight=False,
    )

    starts = step.query_start_loc
    rows = []
    for index, request in enumerate(scenario.requests):
        own = step.logits_indices
        own = own[(own >= starts[index]) & (own < starts[index + 1])]
        values = (getattr(step, name)[index] for name in REQUEST_LEVEL)
        span = f"{starts[index]}:{starts[index + 1]}"
        rows.append([request.req_id, *values, span, ", ".join(map(str, own))])
    columns = ["req_id", *REQUEST_LEVEL, "query_start_loc", "logits_indices"]
    _print_table(console, "request level", columns, rows)

    spans = modality_spans(scenario, step)
    if spans:
        items = [[*list(span.values())[:4], _span(span["tokens"])] for span in spans]
        columns = ["req_id", "modality", "offset", "length", "tokens"]
        _print_table(console, "images and videos", columns, items)

    variables = token_level(step)
    for dim, row in enumerate(step.mrope_positions):
        variables[f"mrope_positions {dim}"] = row
    for index in range(1, len(groups)):
        variables |= {f"{name} {index}": getattr(step, name)(index) for name in GROUP_LEVEL[1:]}
    tokens = list(range(step.total_num_scheduled_tokens))
    folded = max(0, len(tokens) - FOLDED_TOKENS)
    if folded:
        del tokens[FOLDED_TOKENS // 2 : -FOLDED_TOKENS // 2]
    rows = [[token, *(value[token] for value in variables.values())] for token in tokens]
    _print_table(console, "token level", ["token", *variables], rows)
    if folded:
        console.print(f"{folded} tokens in the middle are folded; --json has them all")

    for index, group in enumerate(groups):
        rows = [
            [request.req_id, " ".join(map(str, blocks))]
            for request, blocks in zip(scenario.requests, step.block_table(index).tolist())
        ]
        title = "system level"
        if len(groups) > 1:
            title += f", group {index} (block size {group.block_size})"
        _print_table(console, title, ["req_id", "block_table"], rows)
        if group.attention_chunk_size is not None:
            _print_local(console, title, step.local_requests(index))


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
    _print_table(console, f"{title}: virtual requests", names, rows)


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
