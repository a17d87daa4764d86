"""Prepares recorded steps by vLLM's own V1 runner: ``replay --upstream`` compares with it.

The runner gets a made-up model whose sizes are the record's, and the batch of each step in its own
tables; its own code does the rest. It needs neither the served model nor an engine.
``docs/guides/recording.md`` lists what is compared. vLLM is imported when the first step is asked
for.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.record_difference import Difference, first_difference
from vllm_npu_prep.inspect.upstream_runner import (
    RunnerSizes,
    fill_batch,
    import_vllm,
    make_runner,
)
from vllm_npu_prep.prep.arrays import STEP_ARRAYS
from vllm_npu_prep.prep.context_shards import ContextShards, tokens_per_block
from vllm_npu_prep.prep.layout import targets_per_row

if TYPE_CHECKING:
    from vllm_npu_prep.inspect.record import StepRecord
    from vllm_npu_prep.inspect.record_settings import RecordGroup, RecordSettings


class UpstreamReplay:
    """Prepares records by upstream's runner; one runner serves all that have the same sizes.

    Raises
    ------
    PrepError
        If vLLM is missing, another version, or can't be imported.
    """

    def __init__(self) -> None:
        self._runners: dict[RunnerSizes, Any] = {}
        with _told("--upstream needs vLLM, which can't be imported here"), _quietly():
            import_vllm()

    def first_difference(self, record: "StepRecord") -> Difference | None:
        """Prepare a step again; return the first difference.

        Raises
        ------
        PrepError
            If upstream's runner can't prepare it.
        """
        return first_difference(record, self.prepare(record), "upstream")

    def prepare(self, record: "StepRecord") -> dict[str, np.ndarray]:
        """Return upstream's arrays by a record's names; those that it lacks are as recorded.

        Raises
        ------
        PrepError
            If upstream's runner can't prepare it.
        """
        states = record.settings.states
        if states is not None and states.num_drafts:
            raise PrepError(
                "--upstream: with drafts, vLLM's runner keeps states in other blocks than this "
                "plugin, so nothing could be compared; replay without --upstream"
            )
        with _quietly():
            with _told("--upstream: vLLM can't make a runner here"):
                runner = self._runner(RunnerSizes.of(record.settings))
            try:
                with _told(f"step {record.number} can't be prepared by upstream's runner"):
                    return _prepare(record, runner)
            except PrepError:
                self._runners.clear()  # its tables are half filled
                raise

    def _runner(self, sizes: RunnerSizes) -> Any:
        if sizes not in self._runners:
            self._runners.clear()  # tables of long contexts are large
            self._runners[sizes] = make_runner(sizes)
        return self._runners[sizes]


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except PrepError:
        raise
    except Exception as error:
        told = " ".join(str(error).split())[:300]
        raise PrepError(f"{what}: {type(error).__name__}: {told}") from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Log only errors, and keep them off stdout, where ``--json`` prints."""
    loggers = [logging.getLogger(name) for name in ("vllm", "transformers")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def _prepare(record: "StepRecord", runner: Any) -> dict[str, np.ndarray]:
    import torch

    settings, batch = record.settings, record.batch
    reqs, total = settings.num_reqs, settings.total_num_scheduled_tokens
    first_sample = 1 + max(0, int(batch.token_ids.max()))
    output = fill_batch(record, runner, first_sample)
    with torch.inference_mode():
        logits_indices, drafts, _ = runner._prepare_inputs(output, batch.num_scheduled_tokens)
        slots, _ = runner._get_slot_mappings(total, reqs, total)
    query_start_loc = runner.query_start_loc.gpu[: reqs + 1].numpy()
    said = {
        "query_lens": (query_lens := np.diff(query_start_loc)),
        "cu_num_tokens": query_start_loc[1:],
        "query_start_loc": query_start_loc,
        "max_query_len": np.array(query_lens.max()),
        "seq_lens": runner.seq_lens[:reqs].numpy(),
        "max_seq_len": runner.optimistic_seq_lens_cpu[:reqs].max().numpy(),
        "num_computed_tokens": runner.num_computed_tokens[:reqs].numpy(),
        "discard_request_mask": runner.discard_request_mask.gpu[:reqs].numpy(),
        "logits_indices": logits_indices.numpy(),
        "req_indices": runner.req_indices.gpu[:total].numpy(),
        "query_pos": runner.query_pos.gpu[:total].numpy(),
        "positions": runner.positions[:total].numpy(),
        "input_ids": runner.input_ids.gpu[:total].numpy(),
    }
    if settings.mrope_dims:
        said["mrope_positions"] = runner.mrope_positions.gpu[:, :total].numpy()
    if drafts is not None:
        said |= {name: vars(drafts)[name].numpy() for name in STEP_ARRAYS if name in vars(drafts)}
    if settings.shards is not None:
        said |= _kept_lengths(settings.shards, runner, reqs)
    out = _without_samples(record, said, first_sample)
    for index, group in enumerate(settings.groups):
        if group.group >= len(settings.block_sizes):
            continue  # encoder-only: neither blocks nor slots
        block_tokens = tokens_per_block(settings.shards, settings.block_sizes[group.group])
        columns = -(-settings.max_model_len // block_tokens)
        table = runner.input_batch.block_table[group.group].get_device_tensor(reqs)
        blocks = table[:, :columns].numpy()
        arrays = {"slot_mapping": slots[group.group].numpy(), "block_table": blocks}
        if group.state_threshold is not None:
            states = _states(table, runner.seq_lens[:reqs], settings.block_sizes[group.group])
            arrays = {"block_table": blocks, "state_indices": states}
        prefix = settings.group_prefixes[index]
        out |= {f"{prefix}{name}": array for name, array in arrays.items()}
        if index == settings.main_group:
            out |= arrays
        if group.attention_chunk_size is not None:
            out |= _local_requests(settings, group, prefix, runner, table)
    return _with_rest(record, out)


def _kept_lengths(shards: ContextShards, runner: Any, num_reqs: int) -> dict[str, np.ndarray]:
    """Return what the rank keeps of each request, as upstream's builders of metadata count it."""
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    out: dict[str, np.ndarray] = {}
    lengths = {"seq_lens": runner.seq_lens, "context_lens": runner.num_computed_tokens}
    for name, lens in lengths.items():
        of_rank = shards.world_size, shards.rank, shards.interleave_size
        kept = get_dcp_local_seq_lens(lens[:num_reqs], *of_rank).numpy()
        out |= {f"{prefix}dcp_local_{name}": kept for prefix in ("", "dcp.")}
    return out


def _states(table: Any, seq_lens: Any, block_size: int) -> np.ndarray:
    """Return the blocks to which upstream's layers write the recurrent states of a group."""
    from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(block_size, (), ())
    return mamba_get_block_table_tensor(table, seq_lens, spec, "align")[:, 0].numpy()


def _without_samples(
    record: "StepRecord", said: dict[str, np.ndarray], first_sample: int
) -> dict[str, np.ndarray]:
    """Compare the places of samples that only the device had, instead of their ids.

    A place that was kept for a draft which never came holds -1; the core makes it token 0.
    """
    settings, batch = record.settings, record.batch
    ids, total = said["input_ids"].copy(), settings.total_num_scheduled_tokens
    ends = np.cumsum(batch.num_scheduled_tokens)
    first_drafts = np.repeat(ends - batch.num_draft_tokens, batch.num_scheduled_tokens)
    is_draft = np.arange(total) >= first_drafts
    on_device = ids >= first_sample
    out = said | {"input_ids": np.where(is_draft, np.maximum(ids, 0), ids)}
    if not settings.num_sampled_rows:
        return out
    layout, num_drafts = settings.layout, settings.num_sampled_drafts
    tokens = layout.offset_int32("input_ids")
    per_row = targets_per_row(num_drafts)
    # Unused samples go to the spare element after the tokens
    targets = np.full(settings.num_sampled_rows * per_row, tokens + settings.num_input_tokens)
    rows, nth = np.divmod(ids[on_device] - first_sample, 1 + num_drafts)
    targets[rows * per_row + nth] = tokens + np.flatnonzero(on_device)
    recorded = _recorded(record, "input_ids", out["input_ids"])
    out["input_ids"][on_device] = recorded[:total][on_device]
    if "draft_token_ids" in said:
        ids = said["draft_token_ids"].copy()
        places = np.flatnonzero(ids >= first_sample)
        rows, nth = np.divmod(ids[places] - first_sample, 1 + num_drafts)
        targets[rows * per_row + num_drafts + nth] = layout.offset_int32("draft_token_ids") + places
        ids[places] = _recorded(record, "draft_token_ids_padded", ids)[places]
        out["draft_token_ids"] = ids
    return out | {"is_on_device": on_device, "sampled_token_targets": targets}


def _recorded(record: "StepRecord", name: str, like: np.ndarray) -> np.ndarray:
    """Return the recorded array; `like` if the recorded one can't replace it."""
    recorded = record.prepared.get(name)
    if recorded is None or recorded.ndim != like.ndim or recorded.dtype.kind not in "bi":
        return like
    if any(size < least for size, least in zip(recorded.shape, like.shape)):
        return like
    return recorded


def _local_requests(
    settings: "RecordSettings", group: "RecordGroup", prefix: str, runner: Any, table: Any
) -> dict[str, np.ndarray]:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches

    assert group.attention_chunk_size is not None
    reqs, block_size = settings.num_reqs, settings.block_sizes[group.group]
    common = CommonAttentionMetadata(
        query_start_loc=runner.query_start_loc.gpu[: reqs + 1],
        query_start_loc_cpu=runner.query_start_loc.cpu[: reqs + 1],
        seq_lens=runner.seq_lens[:reqs],
        num_reqs=reqs,
        num_actual_tokens=settings.total_num_scheduled_tokens,
        max_query_len=0,
        max_seq_len=0,
        block_table_tensor=table,
        slot_mapping=table,
    )
    local, _ = make_local_attention_virtual_batches(group.attention_chunk_size, common, block_size)
    query_start_loc, seq_lens = local.query_start_loc.numpy(), local.seq_lens.numpy()
    query_lens = np.diff(query_start_loc)
    scalars = {
        "num_reqs": local.num_reqs,
        "max_query_len": int(query_lens.max()),
        "max_seq_len": local.max_seq_len,
    }
    arrays = {
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "num_computed_tokens": seq_lens - query_lens,
    }
    out = {f"local_requests.{name}": np.array(value) for name, value in scalars.items()}
    out |= {f"local_{name}": array for name, array in arrays.items()}
    out |= {f"{prefix}local_requests.{name}": array for name, array in arrays.items()}
    # Blocks past a virtual request's positions are not read
    columns = np.arange(local.block_table_tensor.shape[1]) * block_size
    is_read = columns < seq_lens[:, None]
    blocks = np.ma.array(local.block_table_tensor.numpy(), mask=~is_read)
    return out | {f"{prefix}local_requests.block_table": blocks}


def _with_rest(record: "StepRecord", said: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the part that the record has; padding and unread blocks are as recorded."""
    out = {}
    for name, array in said.items():
        if name in record.prepared:
            recorded = record.prepared[name]
            fits = recorded.shape == array.shape
            out[name] = _over(_recorded(record, name, array), array) if fits else array
        if f"{name}_padded" in record.prepared:
            out[f"{name}_padded"] = _over(_recorded(record, f"{name}_padded", array), array)
    return out


def _over(recorded: np.ndarray, array: np.ndarray) -> np.ndarray:
    """Return the recorded array with `array` written to its first corner, except where masked."""
    out = recorded.astype(np.result_type(recorded, array))
    corner: tuple[Any, ...] = (*(slice(size) for size in array.shape), ...)
    np.copyto(out[corner], np.ma.getdata(array), where=~np.ma.getmaskarray(array))
    return out
