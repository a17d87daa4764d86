"""Prepares recorded steps again, and shows the first difference: ``vllm-npu-prep replay``.

The pure core, the scalar oracle and, if asked for, vLLM's own runner each prepare the step again.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.records.difference import Difference, first_difference
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm_npu_prep.prep.oracle import OracleRequest
    from vllm_npu_prep.records.record import StepRecord
    from vllm_npu_prep.records.settings import RecordGroup

ORACLE_CELLS = 1 << 20
"""Masks and chunks with at most this many cells are checked cell by cell."""


# ---------------------------------------------------------------------- preparing again


def replay_core(record: "StepRecord") -> Difference | None:
    from vllm_npu_prep.prep.batch import prepare_step
    from vllm_npu_prep.prep.layout import ALIGNMENT
    from vllm_npu_prep.records.contract import prepared_arrays

    batch, padding = record.step_batch()
    layout = record.settings.layout
    nbytes = -(-layout.nbytes(batch.num_targets) // ALIGNMENT) * ALIGNMENT
    try:
        step = prepare_step(batch, padding, layout, layout.views(np.zeros(nbytes, np.uint8)))
    except ValueError as error:  # an edited file that contradicts itself
        raise PrepError(f"step {record.number} can't be prepared: {error}") from None
    expected = prepared_arrays(step, record.settings)
    for name in record.prepared:
        if name not in expected:
            return Difference(record.number, "core", name, (), None, None, "an array", "none")
    return first_difference(record, expected, "core")


def replay_oracle(record: "StepRecord") -> Difference | None:
    settings = record.settings
    prefixes = settings.group_prefixes
    for index, group in enumerate(settings.groups):
        prefix = "" if index == settings.main_group else prefixes[index]
        expected = _oracle_arrays(record, group, prefix)
        found = first_difference(record, expected, "oracle")
        if found is not None:
            return found
    return None


# ---------------------------------------------------------------------- the oracle


class KnownTokens(Sequence[int]):
    """The tokens of a request, as far as a record knows them; the others are 0."""

    def __init__(self, length: int, known: dict[int, int]) -> None:
        self.length, self.known = length, known

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.known.get(index if index >= 0 else index + self.length, 0)


def oracle_requests(record: "StepRecord", group: int) -> "list[OracleRequest]":
    """Return the requests of a record in plain Python values, with their blocks of one group."""
    from vllm_npu_prep.prep.context_shards import tokens_per_block
    from vllm_npu_prep.prep.oracle import OracleRequest

    settings, batch = record.settings, record.batch
    num_columns = 1
    blocks = [[0]] * settings.num_reqs
    if group < len(settings.block_sizes):
        size = tokens_per_block(settings.shards, settings.block_sizes[group])
        num_columns = -(-settings.max_model_len // size)
        if settings.states is not None and group in settings.states.groups:
            num_columns += settings.states.num_drafts  # each draft has a state of its own
        first = int(batch.num_blocks[:group].sum())
        ends = first + np.cumsum(batch.num_blocks[group])
        starts = ends - batch.num_blocks[group]
        blocks = [batch.block_ids[a:b].tolist()[:num_columns] for a, b in zip(starts, ends)]
    requests, start = [], 0
    accepted = batch.num_accepted_tokens.tolist() or [1] * settings.num_reqs
    for req in range(settings.num_reqs):
        computed, scheduled, num_tokens, drafts, prompt = (
            int(getattr(batch, name)[req])
            for name in (
                "num_computed_tokens",
                "num_scheduled_tokens",
                "num_tokens",
                "num_draft_tokens",
                "num_prompt_tokens",
            )
        )
        span = batch.token_ids[start : start + scheduled].tolist()
        known = dict(enumerate(span, computed))
        if len(batch.next_token_ids):
            # -1 stands for a sample that is still on the device: the core makes it token 0
            behind = min(computed + scheduled, num_tokens - 1)
            known[behind] = max(0, int(batch.next_token_ids[req]))
        mrope: list[list[int]] = []
        length = int(batch.mrope_lengths[req]) if settings.mrope_dims else 0
        if length:
            seen = max(0, min(length - computed, scheduled))
            rows = batch.mrope_positions[:, start : start + seen].tolist()
            mrope = [KnownTokens(length, dict(enumerate(row, computed))) for row in rows]  # type: ignore[misc]
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


def _oracle_arrays(
    record: "StepRecord", group: "RecordGroup", prefix: str
) -> dict[str, np.ndarray]:
    """Return the oracle's values by a record's names; values that it can't know are as recorded."""
    from vllm_npu_prep.prep.arrays import STEP_ARRAYS
    from vllm_npu_prep.prep.oracle import OracleGraphs, oracle_local_requests, oracle_step
    from vllm_npu_prep.records.contract import DCP_LINES, GROUP_LEVEL

    settings = record.settings
    if group.state_threshold is not None:
        return _oracle_states(record, group, prefix)
    has_table = group.group < len(settings.block_sizes)
    block_size = settings.block_sizes[group.group] if has_table else settings.max_model_len
    requests = oracle_requests(record, group.group)
    sizes, total = settings.num_input_tokens, settings.total_num_scheduled_tokens
    padding: dict[str, Any] = {"capture_sizes": [sizes]}
    if settings.mode == "FULL":
        query_len, rows = settings.decode_query_len, settings.num_reqs_padded
        mode, rows = ("FULL_DECODE_ONLY", rows) if query_len else ("FULL", rows - 1)
        padding = {"graphs": OracleGraphs(mode, [sizes], rows, max(1, query_len))}
    elif settings.num_reqs_padded == settings.num_reqs:
        padding = {"graphs": OracleGraphs("PIECEWISE", [sizes], settings.num_reqs)}
    longest = int((record.batch.num_computed_tokens + record.batch.num_scheduled_tokens).max())
    is_small = max(longest, sizes) * longest <= ORACLE_CELLS
    said = oracle_step(
        requests,
        block_size=block_size,
        max_model_len=settings.max_model_len,
        mask="compressed" if settings.mask == "compressed" or not is_small else "dense",
        sliding_window=group.sliding_window,
        chunked_prefill=settings.chunked_prefill,
        speculation=settings.max_drafts > 0,
        mrope_dims=settings.mrope_dims,
        dcp=None if settings.dcp is None else (*settings.dcp.model_dump().values(),),
        **padding,
    )
    mask = said.pop("attn_mask")
    said.pop("runtime_mode", None)
    state = said.pop("attn_state")
    out = {} if prefix else {"attn_state": np.array(state, "S")}
    if settings.dcp is not None:
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
        if settings.latent is not None:
            out |= _oracle_latent(record, requests)
    if group.attention_chunk_size is not None:
        if total * group.attention_chunk_size <= ORACLE_CELLS:
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


def _oracle_states(
    record: "StepRecord", group: "RecordGroup", prefix: str
) -> dict[str, np.ndarray]:
    from vllm_npu_prep.prep.oracle import oracle_state_step
    from vllm_npu_prep.records.contract import STATE_BLOCKS, TOKEN_STATES

    settings = record.settings
    states, threshold = settings.states, group.state_threshold
    assert states is not None and threshold is not None
    said = oracle_state_step(
        oracle_requests(record, group.group),
        decode_threshold=threshold,
        block_size=settings.block_sizes[group.group],
        num_drafts=states.num_drafts,
    )
    tokens, kept = said.pop(TOKEN_STATES), said.pop("num_accepted_tokens")
    blocks = {name: np.array(said.pop(name)) for name in STATE_BLOCKS}
    out = {f"{prefix}{name}": array for name, array in blocks.items()}
    total = settings.total_num_scheduled_tokens
    out[f"{prefix}slot_mapping"] = np.full(total, -1)
    for name, value in said.items():
        if isinstance(value, int):
            out[f"states.{name}"] = np.array(value)
        else:
            out[f"{name}_padded"] = _with_rest(record, f"{name}_padded", value)
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


def _oracle_latent(
    record: "StepRecord", requests: Sequence["OracleRequest"]
) -> dict[str, np.ndarray]:
    from vllm_npu_prep.prep.oracle import oracle_latent_step

    latent, out = record.settings.latent, {}
    assert latent is not None
    for name, value in oracle_latent_step(requests, **latent.model_dump()).items():
        if isinstance(value, int):
            out[f"latent.{name}"] = np.array(value)
        else:
            out[f"{name}_padded"] = _with_rest(record, f"{name}_padded", value)
    return out


def _with_rest(record: "StepRecord", name: str, values: list[int]) -> np.ndarray:
    """Return the values, padded with 0 to the recorded length."""
    recorded = record.prepared.get(name)
    out = np.zeros(max(len(values), 0 if recorded is None else recorded.size), np.int64)
    out[: len(values)] = values
    return out


def _leave_out_samples(record: "StepRecord", out: dict[str, np.ndarray], total: int) -> None:
    """Take the ids as recorded that only the device has; which tokens these are is checked.

    Only with asynchronous scheduling are there such tokens.
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
    for name, places in (
        ("input_ids", np.flatnonzero(on_device)),
        ("input_ids_padded", np.flatnonzero(on_device)),
        ("draft_token_ids_padded", np.array(drafts_on_device, np.int64)),
    ):
        recorded = record.prepared.get(name)
        if name in out and recorded is not None and recorded.shape == out[name].shape:
            out[name][places] = recorded[places]


# ---------------------------------------------------------------------- the command


def replay(path: Path, step: int | None = None) -> Iterator[tuple[Path, list[Difference]]]:
    """Prepare recorded steps again.

    Parameters
    ----------
    path
        See `record_files`.
    step
        Number of the only step to look at.

    Yields
    ------
    path, differences
        Of each record: the core's first difference and the oracle's, if there are any.

    Raises
    ------
    PrepError
        For a file that is not a record, or if there is no such step.
    """
    from vllm_npu_prep.records.record_file import read_record, record_files

    files = record_files(path, step)
    for file in files:
        record = read_record(file)
        try:
            found = [replay_core(record), replay_oracle(record)]
        except PrepError as error:
            raise PrepError(f"{file}: {error}") from None
        yield file, [each for each in found if each is not None]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="prepare recorded steps again and show the first difference",
        description="Prepare recorded steps again by the core and by the oracle, and show the "
        "first difference. The exit code is 1 if there is one.",
    )
    parser.add_argument("path", type=Path, metavar="DIR", help="a run's folder, or one record")
    parser.add_argument("--step", type=int, metavar="N", help="this step only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay, and print the result; return 0 if all agree, 1 if not."""
    count, differing, first = 0, 0, None
    for file, differences in replay(args.path, args.step):
        count += 1
        differing += bool(differences)
        if first is None and differences:
            first = file, differences
    if args.json:
        found = [] if first is None else [asdict(each) for each in first[1]]
        where = None if first is None else str(first[0])
        print(json.dumps({"steps": count, "differing": differing, "file": where, "first": found}))
    elif first is None:
        print(f"{counted(count, 'step')}: core and oracle prepare what was recorded")
    else:
        verb = "differs" if differing == 1 else "differ"
        print(f"{differing} of {counted(count, 'step')} {verb}, first in {first[0]}")
        for each in first[1]:
            print(each)
    return int(first is not None)
