"""Finds, reads and checks the files of records.

No file is trusted: sizes are checked before memory is allocated, and values before they reach
compiled code, which checks no bounds.
"""

import json
import math
import re
import zipfile
from collections.abc import Set
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.arrays import NO_PREVIOUS_ROW, PADDING_ROWS
from vllm_npu_prep.prep.layout import targets_per_row
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.records.contract import prepared_names
from vllm_npu_prep.records.record import FORMAT, WIDE, RecordBatch, StepRecord
from vllm_npu_prep.records.scenario import why_not_json
from vllm_npu_prep.records.settings import RecordSettings
from vllm_npu_prep.validation import described
from vllm_npu_prep.wording import counted, runs_of

RECORD_SUFFIX = ".npz"
MAX_RECORD_BYTES = 1 << 28
"""The most bytes of a record's arrays: a step of 8192 tokens and 256 rows of blocks has 10 MB."""

MAX_NAMED = 5
"""The most names that a message lists."""

MAX_TOKEN_CELLS = 1 << 30
MAX_BLOCK_CELLS = 1 << 25
"""The most cells of the tables that a record is prepared on. Entries that the step doesn't use are
untouched zeros: they take address space, not memory.
"""
ARRAY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(<i4|<i8|\|b1|\|u1|\|S[1-9]\d?)', "
    rb"'fortran_order': False, 'shape': \(([\d, ]{0,100})\), \} *\n",
    re.DOTALL,
)
"""The first bytes of numpy's array format in records; anything else is refused unread."""


def record_files(
    path: Path,
    step: int | None = None,  # number of the one step to return
) -> list[Path]:
    """Return the records, one or more, of a file, a run's folder or a folder of runs."""
    name = "step-*" if step is None else f"step-{step:06d}"
    if path.is_file():
        if step is None or path.stem == name:
            return [path]
        raise PrepError(f"--step {step}: {path} is the record of another step")
    if not path.exists():
        raise PrepError(f"{path}: No such file or directory")
    files = sorted(path.glob(f"{name}{RECORD_SUFFIX}"))
    files = files or sorted(path.glob(f"*/{name}{RECORD_SUFFIX}"))
    if not files and step is not None:
        _refuse_step(path, step)
    if not files:
        raise PrepError(
            f"{path}: no {name}{RECORD_SUFFIX} here; give a record, the folder of a run, or the "
            'folder that "npu_prep.record.dir" named'
        )
    return files


def _refuse_step(path: Path, step: int) -> None:
    """Raise with the steps that a folder holds; return if it holds none."""
    held: dict[Path, list[int]] = {}
    pattern = f"step-*{RECORD_SUFFIX}"
    for file in sorted(path.glob(pattern)) or sorted(path.glob(f"*/{pattern}")):
        number = file.stem.removeprefix("step-")
        if number.isdecimal():
            held.setdefault(file.parent, []).append(int(number))
    if not held:
        return
    runs = [f"{folder} holds {_steps(numbers)}" for folder, numbers in held.items()]
    more = f"; and {counted(len(runs) - MAX_NAMED, 'run')} more" if len(runs) > MAX_NAMED else ""
    raise PrepError(f"--step {step} is not there: {'; '.join(runs[:MAX_NAMED])}{more}")


def _steps(numbers: list[int]) -> str:
    """Return some steps in words: ``steps 3, 5 to 9``."""
    runs = runs_of(sorted(numbers))
    texts = [" to ".join(map(str, dict.fromkeys((run[0], run[-1])))) for run in runs]
    if len(texts) > MAX_NAMED:
        texts = [*texts[: MAX_NAMED - 1], "...", texts[-1]]
    return f"{'step' if len(numbers) == 1 else 'steps'} {', '.join(texts)}"


def record_of(path: Path, step: int | None = None) -> Path:
    """Return the one record at a path, or refuse it; `record_files` says what the path may be."""
    files = record_files(path, step)
    if len(files) > 1:
        first, last = files[0].relative_to(path), files[-1].relative_to(path)
        choose = "name one, or choose by --step N" if step is None else "name the folder of one run"
        raise PrepError(f"{path}: {len(files)} records, {first} to {last}; {choose}")
    return files[0]


def read_record(path: Path) -> StepRecord:
    """Read and check a record; refuse a file that is none, in one line."""
    try:
        arrays = _read_arrays(path)
        settings = _read_settings(arrays)
        batch = _read_batch(settings, arrays)
        _refuse_foreign(settings, arrays)
    except PrepError as error:
        raise PrepError(f"{path}: {error}") from None
    return StepRecord(settings, batch, arrays)


OUTLINED = (
    "num_computed_tokens",
    "num_prompt_tokens",
    "num_scheduled_tokens",
    "num_draft_tokens",
    "num_blocks",
    "block_ids",
)
"""The arrays of a `RecordBatch` that an outline has."""

OUTLINE_MEMBERS = {"settings", "attn_state", *(f"batch.{name}" for name in OUTLINED)}


def read_outline(path: Path) -> StepRecord:
    """Read and check what pages about many steps show: a record without its tokens.

    Of its batch only the arrays in `OUTLINED` are there, and of what was prepared the state.
    """
    try:
        arrays = _read_arrays(path, OUTLINE_MEMBERS)
        settings = _read_settings(arrays)
        shapes = _shapes_of(settings)
        found = {item.name: np.empty(0, _dtype_of(item.name)) for item in fields(RecordBatch)}
        found |= {name: _batch_array(arrays, name, shapes[name]) for name in OUTLINED}
        _require("attn_state" in arrays, "attn_state is missing")
        outline = StepRecord(settings, RecordBatch(**found), arrays)
        _require(outline.attn_state in AttentionState.__members__, "attn_state")
        _check_counts(settings, outline.batch)
    except PrepError as error:
        raise PrepError(f"{path}: {error}") from None
    return outline


def _refuse_foreign(settings: RecordSettings, arrays: dict[str, np.ndarray]) -> None:
    foreign = sorted(set(arrays) - prepared_names(settings))
    if foreign:
        names = ", ".join(foreign[:MAX_NAMED]) + ", ..." * (len(foreign) > MAX_NAMED)
        raise PrepError(f"holds {names}, which the record of such a step does not have")


def _read_arrays(path: Path, names: Set[str] | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of an ``.npz`` file, or those of these names.

    Nothing is unpickled, and no array is larger than it says.
    """
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            raise PrepError(f"larger than {MAX_RECORD_BYTES:,} bytes: no record is that large")
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if names is not None:
                members = [m for m in members if m.filename.removesuffix(".npy") in names]
            if sum(member.file_size for member in members) > MAX_RECORD_BYTES:
                raise PrepError(
                    f"holds more than {MAX_RECORD_BYTES:,} bytes: no record is that large"
                )
            contents = {}
            for member in members:
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise PrepError(
                        f"{_shown(member.filename)} is compressed in a way that records are not"
                    )
                with archive.open(member) as file:
                    content = file.read(member.file_size + 1)
                if len(content) != member.file_size or member.filename in contents:
                    raise PrepError(
                        f"{_shown(member.filename)} does not match the archive's list of contents"
                    )
                contents[member.filename] = content
    except OSError as error:
        raise PrepError(error.strerror or str(error)) from None
    except PrepError:
        raise
    except Exception as error:  # zipfile passes on whatever its parts raise for bad bytes
        raise PrepError(f"not a record: {type(error).__name__}: {_one_line(error)}") from None
    arrays = {_member_name(name): _parse_array(name, each) for name, each in contents.items()}
    return arrays


def _member_name(name: str) -> str:
    if not re.fullmatch(r"[a-z_.0-9]{1,80}\.npy", name):
        raise PrepError(f"{_shown(name)} is not the name of an array of a record")
    return name.removesuffix(".npy")


def _shown(name: str) -> str:
    return repr(name[:80]) if name.isprintable() else "a member whose name can't be shown"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:200]


def _parse_array(name: str, content: bytes) -> np.ndarray:
    """Return an array as `numpy.save` writes it, of few types and at most two dimensions."""
    found = ARRAY_HEADER.match(content)
    if found is None or len(found[0]) != 10 + int.from_bytes(content[8:10], "little"):
        raise PrepError(f"{name} is not an array as records hold them")
    dtype = np.dtype(found[1].decode())
    shape = tuple(int(size) for size in found[2].decode().replace(",", " ").split())
    if len(shape) > 2 or math.prod(shape) * dtype.itemsize != len(content) - len(found[0]):
        raise PrepError(f"{name} has another size than its header says")
    return np.frombuffer(content, dtype, offset=len(found[0])).reshape(shape).copy()


def _read_settings(arrays: dict[str, np.ndarray]) -> RecordSettings:
    if "settings" not in arrays or arrays["settings"].dtype != np.uint8:
        raise PrepError("not a record: it has no settings")
    try:
        data = json.loads(arrays.pop("settings").tobytes())
    except (ValueError, RecursionError) as error:
        raise PrepError(f"settings: not JSON: {why_not_json(error)}") from None
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        given = f"of format {version}" if isinstance(version, int) else "without a format"
        raise PrepError(
            f"a record {given}; this version reads format {FORMAT}: use the version of "
            "vllm_npu_prep that its manifest.json names"
        )
    try:
        settings = RecordSettings.model_validate(data)
    except ValidationError as error:
        detail = error.errors()[0]
        key = _one_line(".".join(map(str, detail["loc"])))
        raise PrepError(f"settings.{key}: {_one_line(described(detail))}") from None
    _check_settings(settings)
    return settings


def _require(holds: Any, what: str) -> None:
    if not holds:
        raise PrepError(f"values contradict each other: {what}")


def _check_settings(settings: RecordSettings) -> None:
    """Check settings against each other, and the memory that they would take."""
    num_groups, widths = len(settings.block_sizes), settings.max_num_blocks
    num_rows = settings.max_num_reqs + PADDING_ROWS
    _require(len(widths) == num_groups, "a width of each block table")
    _require(settings.num_reqs <= settings.max_num_reqs, "more requests than max_num_reqs")
    _require(settings.num_reqs <= settings.num_reqs_padded, "more requests than num_reqs_padded")
    tokens = settings.total_num_scheduled_tokens
    _require(settings.num_reqs <= tokens <= settings.num_input_tokens, "tokens of the step")
    _require(settings.max_logits <= settings.num_input_tokens, "max_logits")
    _require(settings.max_drafts <= settings.num_input_tokens, "max_drafts")
    _require(settings.num_sampled_rows <= 1 << 16, "num_sampled_rows")
    for name, cells, most in (
        ("token", settings.max_num_reqs * settings.max_model_len, MAX_TOKEN_CELLS),
        ("block", num_rows * sum(widths), MAX_BLOCK_CELLS),
    ):
        _require(cells <= most, f"a {name} table of {cells:,} cells")
    _require({g.group for g in settings.groups} >= set(range(num_groups)), "groups")
    sizes = {g.attention_chunk_size for g in settings.groups if g.attention_chunk_size}
    _require(len(sizes) <= 1, "attention chunks of several sizes")
    for group in settings.groups:
        chunk_size = group.attention_chunk_size
        if chunk_size:
            _require(group.group < num_groups, "chunks without a block table")
            block_size = settings.block_sizes[group.group]
            _require(chunk_size % block_size == 0, "chunks that are no whole blocks")
            per_chunk = chunk_size // block_size
            _require(not any(w % per_chunk for w in widths), "rows that are no whole chunks")
    layout_bytes = settings.layout.nbytes(
        settings.num_sampled_rows * targets_per_row(settings.num_sampled_drafts)
    )
    _require(layout_bytes <= MAX_RECORD_BYTES, f"arrays of {layout_bytes:,} bytes")


def _read_batch(settings: RecordSettings, arrays: dict[str, np.ndarray]) -> RecordBatch:
    shapes = _shapes_of(settings)
    if shapes["num_accepted_tokens"] == (0,):  # older records don't have it
        arrays.setdefault("batch.num_accepted_tokens", np.empty(0, np.int32))
    names = [item.name for item in fields(RecordBatch)]
    batch = RecordBatch(**{name: _batch_array(arrays, name, shapes[name]) for name in names})
    _check_batch(settings, batch)
    return batch


def _shapes_of(settings: RecordSettings) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of a `RecordBatch`; None: any number."""
    reqs, tokens = settings.num_reqs, settings.total_num_scheduled_tokens
    dims, has_drafts = settings.mrope_dims, settings.shape.states.num_drafts > 0
    return {
        **{f.name: (reqs,) for f in fields(RecordBatch) if f.name.startswith("num_")},
        "previous_rows": (reqs if settings.num_sampled_rows else 0,),
        "token_ids": (tokens,),
        "next_token_ids": (reqs if settings.max_drafts else 0,),
        "num_blocks": (len(settings.block_sizes), reqs),
        "block_ids": (None,),
        "mrope_positions": (dims, tokens if dims else 0),
        "mrope_lengths": (reqs if dims else 0,),
        "mrope_position_deltas": (reqs if dims else 0,),
        "placeholders": (len(settings.modalities), 3),
        "rows_with_embeds": (None,),
        "num_accepted_tokens": (reqs if has_drafts else 0,),
    }


def _dtype_of(name: str) -> type[np.integer]:
    return np.int64 if name in WIDE else np.int32


def _batch_array(
    arrays: dict[str, np.ndarray], name: str, shape: tuple[int | None, ...]
) -> np.ndarray:
    """Take an array of what the step was prepared from out of a record's arrays."""
    full_name = f"batch.{name}"
    _require(full_name in arrays, f"{full_name} is missing")
    array = arrays.pop(full_name)
    dtype = _dtype_of(name)
    fits = len(array.shape) == len(shape) and all(
        want is None or want == size for want, size in zip(shape, array.shape)
    )
    if array.dtype != dtype or not fits:
        raise PrepError(
            f"{full_name} is {array.dtype} {list(array.shape)}, but its settings say "
            f"{np.dtype(dtype)} {['any' if s is None else s for s in shape]}"
        )
    return array


def _between(array: np.ndarray, least: Any, most: Any) -> bool:
    return bool(((array >= least) & (array <= most)).all())


def _check_counts(settings: RecordSettings, batch: RecordBatch) -> None:
    max_model_len = settings.max_model_len
    for name in ("num_computed_tokens", "num_scheduled_tokens", "num_prompt_tokens"):
        _require(_between(getattr(batch, name), 0, max_model_len), name)
    computed = batch.num_computed_tokens.astype(np.int64)
    scheduled = batch.num_scheduled_tokens.astype(np.int64)
    drafts = batch.num_draft_tokens.astype(np.int64)
    seq_lens = computed + scheduled
    _require(_between(scheduled, 1, max_model_len), "num_scheduled_tokens")
    _require(_between(seq_lens, 1, max_model_len), "tokens past max_model_len")
    _require(scheduled.sum() == settings.total_num_scheduled_tokens, "num_scheduled_tokens")
    _require(_between(drafts, 0, scheduled - 1), "num_draft_tokens")
    _require(drafts.sum() <= settings.max_drafts, "more drafts than max_drafts")
    _require(drafts.sum() + len(drafts) <= settings.max_logits, "more logits than max_logits")
    widths = np.array(settings.max_num_blocks, np.int64)[:, None]
    block_sizes = np.array(settings.block_sizes, np.int64)[:, None]
    _require(_between(batch.num_blocks, 0, widths), "num_blocks")
    num_blocks = batch.num_blocks.sum(axis=1, dtype=np.int64)
    _require(num_blocks.sum() == len(batch.block_ids), "block_ids")
    last_blocks = np.repeat((1 << 31) // block_sizes[:, 0] - 1, num_blocks)
    _require(_between(batch.block_ids, 0, last_blocks), "block_ids past 32 bits of slots")
    longest = widths * block_sizes * settings.shape.dcp.world_size
    _require(_between(seq_lens, 0, longest), "sequences past their block tables")


def _check_batch(settings: RecordSettings, batch: RecordBatch) -> None:
    """Check what compiled code relies on, because it checks no bounds."""
    _check_counts(settings, batch)
    between, max_model_len, drafts = _between, settings.max_model_len, batch.num_draft_tokens
    _require(between(batch.num_tokens, 1, max_model_len), "num_tokens")
    last_row = settings.num_sampled_rows - 1
    _require(between(batch.previous_rows, NO_PREVIOUS_ROW, last_row), "previous_rows")
    _require(between(batch.mrope_lengths, 0, max_model_len), "mrope_lengths")
    _require(between(batch.mrope_positions, -(1 << 40), 1 << 40), "mrope_positions")
    _require(between(batch.mrope_position_deltas, -(1 << 40), 1 << 40), "mrope_position_deltas")
    _require(between(batch.placeholders[:, 0], 0, len(drafts) - 1), "placeholders")
    _require(between(batch.placeholders[:, 1:], 0, 1 << 40), "placeholders")
    _require(between(batch.rows_with_embeds, 0, len(drafts) - 1), "rows_with_embeds")
    most = 1 + settings.shape.states.num_drafts
    _require(between(batch.num_accepted_tokens, 1, most), "num_accepted_tokens")
