"""A prepared step as arrays, by the keys of the JSON contract (`docs/reference/files.md`).

``explain``, records, replays and the full check name a step's variables by the lists here, which
are derived from `STEP_ARRAYS`.
"""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_npu_prep.prep.arrays import STEP_ARRAYS, Array, Level, PaddingRule, ShownInExplain
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.latent_split import LatentStep
from vllm_npu_prep.prep.layout import StepArrays
from vllm_npu_prep.prep.local_attention import LocalRequests
from vllm_npu_prep.prep.mask import MaskForm, MaskKind, MaskPlan, build_mask, plan_mask
from vllm_npu_prep.prep.pcp import PCPStep
from vllm_npu_prep.prep.recurrent_states import RecurrentStep

if TYPE_CHECKING:
    from vllm_npu_prep.records.settings import LayerGroup, RecordSettings


FULL_MASK_CELLS = 4096
"""Masks up to this many cells are kept cell by cell, as in the JSON contract."""

SHOWN = [line for line in STEP_ARRAYS.values() if ShownInExplain.BATCH in line.shown]
"""Arrays of the step that ``explain`` shows. Other variables of a level follow from arrays."""

GROUP_LEVEL = (
    "block_table",
    "block_table_indices",
    "block_numbers",
    "block_offsets",
    *(line.name for line in SHOWN if line.by_group),
)
"""Variables that each KV-cache group has its own copy of."""

REQUEST_LEVEL = (
    "query_lens",
    "cu_num_tokens",
    *(line.name for line in SHOWN if line.level in (Level.REQUEST, Level.LOGIT, Level.DRAFT)),
)
"""Variables of requests, and of their rows of logits."""

_TOKEN_ARRAYS = [line.name for line in SHOWN if line.dims == ("tokens",)]
TOKEN_LEVEL = ("req_indices", "query_pos", _TOKEN_ARRAYS[0], "token_indices", *_TOKEN_ARRAYS[1:])
"""Variables of tokens, in the order in which they follow from each other."""

SEVERAL_PER_TOKEN = tuple(
    line.name
    for line in SHOWN
    if line.level is Level.TOKEN and len(line.dims) > 1 and not line.by_group
)
"""Variables with several rows of tokens; they have no rows if the model doesn't use them."""

LEVELS: dict[str, Level] = (
    dict.fromkeys((*TOKEN_LEVEL, *GROUP_LEVEL, "is_on_device"), Level.TOKEN)
    | dict.fromkeys(("block_table", "query_lens", "cu_num_tokens"), Level.REQUEST)
    | {name: line.level for name, line in STEP_ARRAYS.items()}
    | {"pcp_ranks": Level.TOKEN}
)
"""What an element of a variable belongs to, along its last dimension; blocks in a table belong to
the request of their row.
"""

UNDEFINED_PADDING = [line for line in STEP_ARRAYS.values() if line.padding is PaddingRule.UNDEFINED]
"""Arrays whose rows past the batch still hold values of earlier steps."""

SCALARS = (
    "total_num_scheduled_tokens",
    "num_input_tokens",
    "num_reqs",
    "max_query_len",
    "max_seq_len",
)
SIZES: dict[str, tuple[str, type[LocalRequests | RecurrentStep | LatentStep | PCPStep]]] = {
    "local_requests": ("local", LocalRequests),
    "states": ("states", RecurrentStep),
    "latent": ("latent", LatentStep),
    "pcp": ("pcp", PCPStep),
}
"""Sizes of a step that some engines have: by the beginning of their names in records, the attribute
of `EngineShape` and `PreparedStep`, and its class.
"""
LOCAL_ARRAYS = (
    "block_table",
    *(
        line.name.removeprefix("chunk_local_")
        for line in STEP_ARRAYS.values()
        if line.level is Level.CHUNK and len(line.dims) == 1
    ),
)
LATENT_LINES = tuple(
    line for line in STEP_ARRAYS.values() if line.level in (Level.PREFILL, Level.PIECE)
)
"""Arrays of latent attention; records of other engines don't have them."""
_SIZES_OF_STATES = {"state_reqs", "token_state_groups", "counted_reqs"}
OF_STATES = [line for line in STEP_ARRAYS.values() if _SIZES_OF_STATES & set(line.dims)]
STATE_BLOCKS = tuple(line.name for line in OF_STATES if line.dims[0] == "state_groups")
"""Variables that each KV-cache group with recurrent states has its own copy of."""
TOKEN_STATES = next(line.name for line in OF_STATES if line.dims[0] == "token_state_groups")
"""The variable with the block of each token's recurrent state, which each such group has, too.
Engines without speculation have no row of it.
"""
STATE_LINES = (*OF_STATES, *(line for line in LATENT_LINES if line.level is Level.PREFILL))
"""Arrays of recurrent states; records of other engines don't have them."""
DCP_LINES = tuple(line for line in STEP_ARRAYS.values() if line.dims == ("sharded_reqs",))
"""Arrays of decode context parallelism; records of other engines don't have them."""
_SIZES_OF_RANKS = {"rank_tokens", "gathered_tokens", "rank_rows", "rank_rows + 1", "rank_reqs"}
PCP_LINES = tuple(line for line in STEP_ARRAYS.values() if _SIZES_OF_RANKS & set(line.dims))
"""Arrays of prefill context parallelism; records of other engines don't have them."""
OF_SOME_ENGINES = {*LATENT_LINES, *STATE_LINES, *DCP_LINES, *PCP_LINES}
NOT_RECORDED = ("idx_mapping",)
"""Arrays that records leave out. A record has its requests in the order of the batch: request rows
of vLLM's V2 runner say nothing in it, and readers know nothing of them.
"""
MASK_ARRAYS = (
    "shape",
    "form",
    "masked",
    "first_masked_position_by_row",
    "first_visible_position_by_row",
)


def mask_plan(step: PreparedStep, mask_form: MaskForm, group: Any) -> MaskPlan:
    """Return the mask of a group's layers in a step; layers with recurrent states have none.

    `group` is a `LayerGroup`, or the builder of these layers' metadata.
    """
    if group.holds_states:
        return MaskPlan(MaskKind.NONE, None)
    max_seq_len = step.local.max_seq_len if group.attention_chunk_size else step.max_seq_len
    if step.shape.pcp:
        max_seq_len = step.pcp.max_seq_len
    return plan_mask(
        step.attn_state,
        mask_form,
        step.num_rank_tokens,
        max_seq_len,
        sliding_window=group.sliding_window,
        attention_chunk_size=group.attention_chunk_size,
        causal=group.causal,
    )


def _sizes(of: Any) -> dict[str, np.ndarray]:
    """Return the fields of one of the classes of `SIZES`, each as int64 ``[]``."""
    return {item.name: np.array(getattr(of, item.name), np.int64) for item in fields(of)}


def latent_variables(step: PreparedStep) -> dict[str, np.ndarray]:
    """Return the decodes, prefills and context chunks of latent attention; empty without it."""
    if not step.shape.latent:
        return {}
    return _sizes(step.latent) | {line.name: getattr(step, line.name) for line in LATENT_LINES}


def dcp_variables(step: PreparedStep) -> dict[str, np.ndarray]:
    """Return what this rank keeps of each request, and which rank keeps each token.

    The result is empty without decode context parallelism.
    """
    if not step.shape.dcp:
        return {}
    return {line.name: getattr(step, line.name) for line in DCP_LINES} | {
        "dcp_ranks": step.owners()
    }


def pcp_variables(step: PreparedStep) -> dict[str, np.ndarray]:
    """Return what this rank computes of the step, and which rank computes each token.

    The result is empty without prefill context parallelism.
    """
    if not step.shape.pcp:
        return {}
    own = {line.name: getattr(step, line.name) for line in PCP_LINES}
    return _sizes(step.pcp) | {"pcp_ranks": step.computing_ranks()} | own


def state_variables(step: PreparedStep, group: int) -> dict[str, np.ndarray]:
    """Return where a group's recurrent states are, and the step's split; empty for other groups."""
    states = step.shape.states
    if group not in states.groups:
        return {}
    index = states.groups.index(group)
    out = _sizes(step.states)
    for line in STATE_LINES:
        array = getattr(step, line.name)
        if line.name == TOKEN_STATES:
            array = array[index] if len(array) else array.reshape(-1)[:0]
        out[line.name] = array[index] if line.name in STATE_BLOCKS else array
    return out


def group_variables(step: PreparedStep, group: int) -> dict[str, np.ndarray]:
    """Return a KV-cache group's own arrays, by the names of `GROUP_LEVEL`.

    For a group with recurrent states they are its block table, its slots and the blocks of its
    states.
    """
    of_states = state_variables(step, group)
    if of_states:
        own = {name: of_states[name] for name in STATE_BLOCKS}
        sent = {line.name: getattr(step, line.name)[group] for line in SHOWN if line.by_group}
        return {"block_table": step.block_table(group), **sent, **own}
    found = {name: getattr(step, name) for name in GROUP_LEVEL}
    return {n: v[group] if n in STEP_ARRAYS else v(group) for n, v in found.items()}


def staged_arrays(arrays: StepArrays, settings: "RecordSettings") -> dict[str, np.ndarray]:
    """Return views of the arrays that are sent to the device, with padding, by a record's names."""
    staged = {}
    for name, line in STEP_ARRAYS.items():
        array = getattr(arrays, name)
        if (line in OF_SOME_ENGINES and not array.size) or name in NOT_RECORDED:
            continue
        if not line.by_group:
            staged[line.recorded_as] = array
            continue
        for index, group in enumerate(settings.groups):
            if group.group < len(array):
                where = "" if index == settings.main_group else f"kv_cache_groups.{index}."
                staged[f"{where}{line.recorded_as}"] = array[group.group]
    return staged


def prepared_arrays(step: PreparedStep, settings: "RecordSettings") -> dict[str, np.ndarray]:
    """Return what was prepared, by the keys of the JSON contract; what the device got is padded.

    Parameters
    ----------
    step
        A prepared step; its tables hold what it read and owns, and zeros elsewhere.
    """
    out = {"attn_state": np.array(step.attn_state.name, "S")}
    out |= {name: getattr(step, name) for name in (*REQUEST_LEVEL, *TOKEN_LEVEL)}
    for index, (group, prefix) in enumerate(zip(settings.groups, settings.group_prefixes)):
        arrays = _group_arrays(step, settings, group)
        out |= {f"{prefix}{name}": array for name, array in arrays.items()}
        if prefix and index == settings.main_group:
            out |= {n: a for n, a in arrays.items() if not n.startswith("local_requests.")}
    out |= {name: np.array(getattr(step, name), np.int64) for name in SCALARS}
    out["num_reqs_padded"] = np.array(step.padding.num_reqs_padded, np.int64)
    for prefix, (part, _) in SIZES.items():
        if getattr(step.shape, part):
            out |= {f"{prefix}.{n}": size for n, size in _sizes(getattr(step, part)).items()}
    out |= {f"dcp.{name}": value for name, value in dcp_variables(step).items()}
    if step.shape.pcp:
        out["pcp.pcp_ranks"] = step.computing_ranks()
    out["model_input"] = np.array("inputs_embeds" if step.batch.takes_embeds else "input_ids", "S")
    out |= {n: a for n in SEVERAL_PER_TOKEN if len(a := getattr(step, n))}
    out |= staged_arrays(step.arrays, settings)
    out |= {
        line.recorded_as: _without_leftovers(step, line)
        for line in UNDEFINED_PADDING
        if line.recorded_as in out
    }
    if step.batch.num_sampled_rows:
        targets = step.arrays.variable_int64[: step.batch.num_targets]
        out["sampled_token_targets"] = targets
        out["is_on_device"] = _on_device(step, targets)
    return {
        name: np.ascontiguousarray(array) if array.ndim else array for name, array in out.items()
    }


def prepared_names(settings: "RecordSettings") -> set[str]:
    """Return every name that `prepared_arrays` can give an array of a step with such settings."""
    of_group = {
        *GROUP_LEVEL,
        *STATE_BLOCKS,
        *(line.recorded_as for line in STEP_ARRAYS.values() if line.by_group),
    }
    of_group |= {f"attn_mask.{name}" for name in MASK_ARRAYS}
    of_group |= {f"local_requests.{name}" for name in LOCAL_ARRAYS}
    names = {f"{prefix}{name}" for prefix in ("", *settings.group_prefixes) for name in of_group}
    names |= {*REQUEST_LEVEL, *TOKEN_LEVEL, *SEVERAL_PER_TOKEN, *SCALARS}
    names |= {"attn_state", "model_input", "num_reqs_padded"}
    names |= {"sampled_token_targets", "is_on_device"}
    names |= {
        f"{prefix}.{item.name}" for prefix, (_, kind) in SIZES.items() for item in fields(kind)
    }
    names |= {f"dcp.{name}" for name in (*(line.name for line in DCP_LINES), "dcp_ranks")}
    names.add("pcp.pcp_ranks")
    return names | {line.recorded_as for line in STEP_ARRAYS.values()}


def _without_leftovers(step: PreparedStep, line: Array) -> np.ndarray:
    """Return a whole array, with zeros past the batch in place of earlier steps' values."""
    out = np.zeros_like(getattr(step.arrays, line.name))
    used = getattr(step, line.name)
    out[..., : used.shape[-1]] = used
    return out


def _group_arrays(
    step: PreparedStep, settings: "RecordSettings", group: "LayerGroup"
) -> dict[str, np.ndarray]:
    out = {}
    if group.group < len(settings.block_sizes):
        out = group_variables(step, group.group)
    plan = mask_plan(step, MaskForm(settings.mask), group)
    out |= {f"attn_mask.{n}": a for n, a in mask_arrays(plan, step.model_positions).items()}
    if group.attention_chunk_size is not None:
        local = step.local_requests(group.group)
        out |= {f"local_requests.{name}": array for name, array in local.items()}
    return out


def mask_arrays(plan: MaskPlan, positions: np.ndarray) -> dict[str, np.ndarray]:
    """Return a mask in the form of the JSON contract.

    ``shape`` is empty without a mask. Of large masks the first masked and visible positions of each
    row stand for the cells.
    """
    if plan.shape is None:
        return {"shape": np.empty(0, np.int64)}
    out = {"shape": np.array(plan.shape, np.int64)}
    if plan.kind == MaskKind.COMPRESSED:
        return out | {"form": np.array(MaskForm.COMPRESSED.value, "S")}
    num_rows, max_seq_len = plan.shape
    mask = build_mask(plan, positions) if num_rows * max_seq_len <= FULL_MASK_CELLS else None
    if mask is not None:
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
    """Mark the tokens whose ids the device took from the last step's samples, not the host."""
    out = np.zeros(step.total_num_scheduled_tokens, np.bool_)
    if step.shape.pcp:  # other ranks' tokens, too, get their ids on the device
        are_awaited = step.batch.previous_rows[: step.num_reqs] >= 0
        out[step.cu_num_tokens[are_awaited] - 1] = True
        return out
    tokens = targets - step.layout.offset_int32("input_ids")
    out[tokens[(tokens >= 0) & (tokens < len(out))]] = True
    return out
