"""The table of a step's arrays, and what follows from it."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from tests.helpers.batches import RandomBatch, random_batches, step_batch
from vllm_npu_prep.observe import step_snapshot
from vllm_npu_prep.prep import bookkeeping, checks, compiled, fused_pass
from vllm_npu_prep.prep.arrays import STEP_ARRAYS, Level, PaddingRule
from vllm_npu_prep.prep.batch import prepare_step
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.prep.local_attention import LocalGroups
from vllm_npu_prep.prep.oracle import OracleRequest
from vllm_npu_prep.prep.padding import no_padding
from vllm_npu_prep.prep.pcp import PCPRank
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.prep.tables import device_has_all

PACKAGE = Path(fused_pass.__file__).parents[1]


def test_arrays_of_tokens_come_first():
    levels = [line.level for line in STEP_ARRAYS.values()]
    of_tokens = levels.count(Level.TOKEN)
    assert levels[:of_tokens] == [Level.TOKEN] * of_tokens
    shapes = (EngineShape(2, drafts, mrope_dims=3) for drafts in (1, 2))
    few, many = (StepLayout(40, *sizes).arrays for sizes in zip((2, 40), shapes))
    names = list(few)
    assert [few[n].offset for n in names[:of_tokens]] == [many[n].offset for n in names[:of_tokens]]
    assert [few[n].offset for n in names[of_tokens:]] != [many[n].offset for n in names[of_tokens:]]


@pytest.mark.parametrize("num_tokens", [15, 16, 17])
def test_spare_elements_belong_to_no_array(num_tokens):
    """Also where the array fills its last line of 64 bytes."""
    layout = StepLayout(2 * num_tokens, 4, EngineShape(pcp=PCPRank(2, 0, 8)))
    names = [name for name, line in STEP_ARRAYS.items() if line.spare]
    assert [layout.arrays[name].shape for name in names] == [(2 * num_tokens,), (num_tokens,)]
    for name in names:
        spare = layout.offset_int32(name) + layout.arrays[name].shape[0]
        ends = [4 * spare, 4 * spare + 4]
        others = [spec for other, spec in layout.arrays.items() if other != name]
        assert all(spec.end <= ends[0] or spec.offset >= ends[1] for spec in others)


@given(random_batches())
def test_past_the_batch_is_the_padding_that_the_table_names(batch: RandomBatch):
    planned = batch.step()
    tables, padding = planned.batch.tables, planned.padding
    two_groups = dataclasses.replace(
        tables,
        block_sizes=np.repeat(tables.block_sizes, 2),
        shape=EngineShape(2, max_logits_per_req=4),
        **device_has_all([tables.block_table(0)] * 2),
    )
    layout = StepLayout(padding.num_input_tokens, padding.num_reqs_padded, two_groups.shape)
    buffer = np.full(-(-layout.nbytes() // 64) * 64, 0x55, np.uint8)  # what an older step left
    step = prepare_step(
        dataclasses.replace(planned.batch, tables=two_groups), padding, layout, layout.views(buffer)
    )
    for name, line in STEP_ARRAYS.items():
        if isinstance(line.padding, PaddingRule) or line.level is Level.CHUNK:
            continue
        array, of_batch = getattr(step.arrays, name), getattr(step, name)
        assert (array[..., of_batch.shape[-1] :] == line.padding).all(), name
        assert np.shares_memory(array, of_batch) or not of_batch.size


def test_every_array_has_a_padding_that_its_dtype_holds():
    for name, line in STEP_ARRAYS.items():
        if not isinstance(line.padding, PaddingRule):
            assert line.dtype.type(line.padding) == line.padding, name
            assert not line.has_borders, f"{name}: borders follow a rule"


def test_compiled_code_finds_every_array_where_the_layout_has_it():
    @compiled.compiled
    def mark(arrays):
        out = compiled.arrays_of(arrays)
        for index in range(out.chunk_local_table_rows.shape[0]):
            out.chunk_local_table_rows[index, 0] = 7 + index
        out.discard_request_mask[-1] = True
        out.mrope_positions[1:, 5:7] = -3
        out.input_ids[out.input_ids.shape[0] - 1] = 9
        out.variable_int32[3] = 4
        sizes = out.buffer_int32.shape[0], out.mrope_positions.strides
        return out.input_ids_offset, out.draft_token_ids_offset, sizes

    layout = StepLayout(8, 2, EngineShape(2, 3, 3, local=LocalGroups(4, 1, (0, 1))))
    views = layout.views(np.zeros(layout.nbytes(4), np.uint8))
    offsets = layout.offset_int32("input_ids"), layout.offset_int32("draft_token_ids")
    sizes = layout.nbytes(4) // 4, views.mrope_positions.strides
    assert mark(views.addresses) == (*offsets, sizes)
    assert views.chunk_local_table_rows[:, 0].tolist() == [7, 8]
    assert views.discard_request_mask.tolist() == [False, True]
    assert views.mrope_positions.tolist() == [[0] * 8] + [[0] * 5 + [-3, -3, 0]] * 2
    assert views.input_ids.tolist() == [0] * 7 + [9]
    assert views.variable_int64[1] == 4 << 32
    assert np.count_nonzero(views.buffer) == 2 + 1 + 4 * 8 + 1 + 1  # -3 has no zero byte


def test_code_that_was_compiled_for_another_table_is_not_loaded(tmp_path, monkeypatch):
    """Numba's cache looks at a function's own file; what it is cached under tells the rest."""
    for function in (
        fused_pass.fill_step_at,
        checks.check_step_at,
        step_snapshot.copy_step,
        bookkeeping.append_sampled_tokens,
    ):
        assert function.py_func.__qualname__.endswith(compiled.DIGEST)
    for name in compiled.SOURCES:
        shutil.copy(PACKAGE / "prep" / name, tmp_path)
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    assert compiled._digest() == compiled.DIGEST
    text = (tmp_path / "arrays.py").read_text()
    (tmp_path / "arrays.py").write_text(text.replace('"reqs", REQUEST, 0', '"reqs", REQUEST, 1'))
    assert compiled._digest() != compiled.DIGEST


def test_tables_that_disagree_on_a_size_are_refused():
    request = OracleRequest(5, 1, 3, list(range(6)), [1, 2])
    batch = step_batch([request], block_size=4, max_model_len=16)
    tables = dataclasses.replace(batch.tables, num_tokens=np.full(2, 6, np.int32))
    with pytest.raises(ValueError, match=r"num_tokens is \[2\], but rows is 3"):
        prepare_step(dataclasses.replace(batch, tables=tables), no_padding(1, 1))
