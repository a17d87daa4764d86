"""A prepared step as arrays by the keys of the JSON contract."""

from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.layout import StepArrays
from vllm_npu_prep.prep.mask import MaskForm, MaskKind, MaskPlan, build_mask, plan_mask

if TYPE_CHECKING:
    from vllm_npu_prep.inspect.record import RecordGroup, RecordSettings


FULL_MASK_CELLS = 4096
"""Masks up to this many cells are kept cell by cell, as in the JSON contract."""

GROUP_LEVEL = (
    "block_table",
    "block_table_indices",
    "block_numbers",
    "block_offsets",
    "slot_mapping",
)
REQUEST_LEVEL = (
    "query_lens",
    "cu_num_tokens",
    "query_start_loc",
    "seq_lens",
    "num_computed_tokens",
    "logits_indices",
)
TOKEN_LEVEL = ("req_indices", "query_pos", "positions", "token_indices", "input_ids")
SCALARS = (
    "total_num_scheduled_tokens",
    "num_input_tokens",
    "num_reqs",
    "max_query_len",
    "max_seq_len",
)
LOCAL_SCALARS = ("num_reqs", "max_query_len", "max_seq_len")
LOCAL_ARRAYS = ("query_start_loc", "seq_lens", "num_computed_tokens", "block_table")
MASK_ARRAYS = (
    "shape",
    "form",
    "masked",
    "first_masked_position_by_row",
    "first_visible_position_by_row",
)


def mask_plan(step: PreparedStep, settings: "RecordSettings", group: "RecordGroup") -> MaskPlan:
    """Mask of a group's layers in a step."""
    local = step.local if group.attention_chunk_size is not None else None
    return plan_mask(
        step.attn_state,
        MaskForm(settings.mask),
        step.num_input_tokens,
        step.max_seq_len if local is None else local.max_seq_len,
        sliding_window=group.sliding_window,
        attention_chunk_size=group.attention_chunk_size,
        causal=group.causal,
    )


def staged_arrays(arrays: StepArrays, settings: "RecordSettings") -> dict[str, np.ndarray]:
    """What travels to the device, padding included, by a record's names: views, nothing copied."""
    staged = {}
    for name in settings.layout.arrays:
        if name == "slot_mapping":
            for index, group in enumerate(settings.groups):
                if group.group < len(arrays.slot_mapping):
                    where = f"kv_cache_groups.{index}." if index else ""
                    staged[f"{where}slot_mapping_padded"] = arrays.slot_mapping[group.group]
        elif name == "input_ids_and_spare":
            staged["input_ids_padded"] = arrays.input_ids
        else:
            staged[name if name == "is_padding" else f"{name}_padded"] = getattr(arrays, name)
    return staged


def prepared_arrays(step: PreparedStep, settings: "RecordSettings") -> dict[str, np.ndarray]:
    """What was prepared, by the keys of the JSON contract; with padding, what the device got.

    Parameters
    ----------
    step
        A prepared step, whose tables hold what it read and owns, and zeros.
    settings
        Its settings.
    """
    out = {"attn_state": np.array(step.attn_state.name, "S")}
    out |= {name: getattr(step, name) for name in (*REQUEST_LEVEL, *TOKEN_LEVEL)}
    for index, (group, prefix) in enumerate(zip(settings.groups, settings.group_prefixes)):
        arrays = _group_arrays(step, settings, group)
        out |= {f"{prefix}{name}": array for name, array in arrays.items()}
        if prefix and index == 0:
            out |= {n: a for n, a in arrays.items() if not n.startswith("local_requests.")}
    scalars: dict[str, Any] = {name: getattr(step, name) for name in SCALARS}
    scalars["num_reqs_padded"] = step.padding.num_reqs_padded
    if step.local is not None:
        scalars |= {f"local_requests.{n}": getattr(step.local, n) for n in LOCAL_SCALARS}
    out |= {name: np.array(value, np.int64) for name, value in scalars.items()}
    out["model_input"] = np.array("inputs_embeds" if step.batch.takes_embeds else "input_ids", "S")
    if settings.mrope_dims:
        out["mrope_positions"] = step.mrope_positions
    drafts, reqs = step.num_drafts, step.num_reqs
    used = {
        "logits_indices_padded": step.num_logits,
        "target_logits_indices_padded": drafts,
        "draft_token_ids_padded": drafts,
        "bonus_logits_indices_padded": reqs,
        "cu_num_draft_tokens_padded": reqs,
        "cu_num_sampled_tokens_padded": reqs,
        "backup_next_token_ids_padded": reqs,
    }
    for name, array in staged_arrays(step.arrays, settings).items():
        if name in used:  # what lies behind is of earlier steps, and not read
            array = np.where(np.arange(len(array)) < used[name], array, array.dtype.type(0))
        out[name] = array
    if step.batch.num_sampled_rows:
        targets = step.arrays.tail_int64[: step.batch.num_targets]
        out["sampled_token_targets"] = targets
        out["is_on_device"] = _on_device(step, targets)
    return {
        name: np.ascontiguousarray(array) if array.ndim else array for name, array in out.items()
    }


def prepared_names(settings: "RecordSettings") -> set[str]:
    """Every name that `prepared_arrays` can give an array of a step with such settings."""
    of_group = {*GROUP_LEVEL, "slot_mapping_padded"}
    of_group |= {f"attn_mask.{name}" for name in MASK_ARRAYS}
    of_group |= {f"local_requests.{name}" for name in (*LOCAL_ARRAYS, *LOCAL_SCALARS)}
    names = {f"{prefix}{name}" for prefix in ("", *settings.group_prefixes) for name in of_group}
    names |= {*REQUEST_LEVEL, *TOKEN_LEVEL, *SCALARS}
    names |= {"attn_state", "model_input", "num_reqs_padded", "mrope_positions"}
    names |= {"sampled_token_targets", "is_on_device", "is_padding", "input_ids_padded"}
    return names | {f"{name}_padded" for name in settings.layout.arrays}


def _group_arrays(
    step: PreparedStep, settings: "RecordSettings", group: "RecordGroup"
) -> dict[str, np.ndarray]:
    """What a group has of its own."""
    out = {}
    if group.group < len(settings.block_sizes):
        out = {name: getattr(step, name)(group.group) for name in GROUP_LEVEL}
    plan = mask_plan(step, settings, group)
    out |= {f"attn_mask.{n}": a for n, a in mask_arrays(plan, step.positions).items()}
    if group.attention_chunk_size is not None:
        local = step.local_requests(group.group)
        out |= {f"local_requests.{name}": array for name, array in local.items()}
    return out


def mask_arrays(plan: MaskPlan, positions: np.ndarray) -> dict[str, np.ndarray]:
    """A mask as the JSON contract has it: ``shape``, none without a mask, and what it holds."""
    if plan.shape is None:
        return {"shape": np.empty(0, np.int64)}
    out = {"shape": np.array(plan.shape, np.int64)}
    if plan.kind == MaskKind.COMPRESSED:
        return out | {"form": np.array(MaskForm.COMPRESSED.value, "S")}
    num_rows, max_seq_len = plan.shape
    if num_rows * max_seq_len <= FULL_MASK_CELLS:
        mask = build_mask(plan, positions)
        assert mask is not None
        return out | {"masked": mask}
    rows = np.arange(max_seq_len) if plan.kind == MaskKind.MATRIX else positions
    if plan.kind == MaskKind.ROWS and plan.attention_chunk_size is not None:
        rows = positions % plan.attention_chunk_size
    padding = np.full(num_rows - len(rows), max_seq_len)
    first_masked = np.concatenate([np.minimum(rows + 1, max_seq_len), padding])
    out["first_masked_position_by_row"] = first_masked
    if plan.sliding_window is not None:
        first_visible = np.maximum(rows + 1 - plan.sliding_window, 0)
        out["first_visible_position_by_row"] = np.concatenate([first_visible, 0 * padding])
    return out


def _on_device(step: PreparedStep, targets: np.ndarray) -> np.ndarray:
    """Tokens whose id was not on the host: the device put the last step's samples there."""
    places = targets - step.layout.place("input_ids_and_spare")
    out = np.zeros(step.total_num_scheduled_tokens, np.bool_)
    out[places[(places >= 0) & (places < len(out))]] = True
    return out
