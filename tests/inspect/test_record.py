"""Records: what they hold, that they come back whole, and that no file does harm."""

import copy
import io
import json
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import worked_examples
from tests.helpers.batches import latent_step, random_batches
from tests.helpers.records import record_of
from tests.helpers.scenarios import example, small
from vllm_npu_prep.cli import main
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.batch import prepare_step
from vllm_npu_prep.prep.embeds import Placeholders
from vllm_npu_prep.records.comparison import core_difference, oracle_difference
from vllm_npu_prep.records.contract import prepared_arrays
from vllm_npu_prep.records.record import StepRecord
from vllm_npu_prep.records.record_file import MAX_RECORD_BYTES, read_record
from vllm_npu_prep.records.scenario import parse_scenario
from vllm_npu_prep.records.settings import LayerGroup


def through_a_file(record: StepRecord, folder) -> StepRecord:
    path = folder / "step-000000.npz"
    path.write_bytes(record.to_bytes())
    return read_record(path)


def same(one: StepRecord, other: StepRecord) -> bool:
    def of(record: StepRecord) -> list[tuple]:
        arrays = record.prepared.items()
        return [(name, array.dtype, array.shape, array.tobytes()) for name, array in arrays]

    return (one.settings, one.batch, of(one)) == (other.settings, other.batch, of(other))


GROUPS = (
    LayerGroup(group=0),
    LayerGroup(group=1, sliding_window=3),
    LayerGroup(group=2, attention_chunk_size=4),
)


def several_groups() -> dict:
    """The small example with a window, chunks and M-RoPE beside it."""
    scenario = small()
    owned = [request["block_ids"] for request in scenario["requests"]]
    more = [[block + 20 * n for block in blocks] for n in (1, 2) for blocks in owned]
    scenario["more_kv_cache_groups"] = [
        {"block_size": 2, "block_ids": more[: len(owned)], "sliding_window": 3},
        {"block_size": 2, "block_ids": more[len(owned) :], "attention_chunk_size": 4},
    ]
    scenario |= {"mrope_dims": 3, "capture_sizes": [8]}
    for request in scenario["requests"][1:]:
        rows = [[90 + dim + n for n in range(request["num_prompt_tokens"])] for dim in range(3)]
        request |= {"mrope_positions": rows, "mrope_position_delta": 5}
    return scenario


LATENT_SCENARIO = example(
    "latent", mask="dense"
)  # prefills whose contexts are read in three chunks
SHARED = example("shared-context", mask="dense")  # what the second of two ranks prepares
LATENT = {"decode_threshold": 1, "workspace_tokens": 8, "block_size": 4}
NAMES = (*worked_examples.NAMES, "several groups", "latent", "shared context")


def scenario_of(name: str) -> tuple[dict, tuple[LayerGroup, ...]]:
    """A scenario of `NAMES`, and its groups."""
    if name == "several groups":
        return several_groups(), GROUPS
    others = {"latent": LATENT_SCENARIO, "shared context": SHARED}
    return copy.deepcopy(others.get(name) or worked_examples.load(name)[0]), GROUPS[:1]


def check_replay(record: StepRecord, folder: Path) -> StepRecord:
    """What a file holds of a record is prepared alike, and shown as it was."""
    again = through_a_file(record, folder)
    assert same(again, record)
    assert core_difference(again) is None and oracle_difference(again) is None
    restored = prepared_arrays(again.step(), again.settings)
    assert all(np.array_equal(restored[name], array) for name, array in record.prepared.items())
    return again


@given(random_batches(), st.sampled_from(["dense", "compressed"]))
@settings(max_examples=100)
def test_any_step_comes_back_and_is_prepared_again_alike(tmp_path_factory, batch, mask):
    groups = (LayerGroup(group=0, sliding_window=batch.sliding_window),)
    record = record_of(batch.step(), groups, mask, number=12)
    check_replay(record, tmp_path_factory.mktemp("record"))


@given(random_batches(), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=50)
def test_any_step_of_latent_attention_is_prepared_again_alike(
    tmp_path_factory, batch, decode_threshold, workspace_blocks
):
    step, _ = latent_step(batch, decode_threshold, workspace_blocks)
    again = check_replay(record_of(step, number=12), tmp_path_factory.mktemp("record"))
    assert again.step().latent == step.latent


@settings(max_examples=20)
@given(random_batches())
def test_what_older_steps_left_in_a_buffer_is_not_recorded(batch):
    fresh = batch.step()
    used = np.full(len(fresh.arrays.buffer), 0x55, np.uint8)
    arrays = fresh.layout.views(used)
    again = prepare_step(batch.step().batch, fresh.padding, fresh.layout, arrays)
    assert same(record_of(again), record_of(fresh))


PADDED = small() | {"capture_sizes": [8]}


@pytest.mark.parametrize(
    ("scenario", "name", "index", "req_id", "token"),
    [
        (PADDED, "positions", 3, "r2", 3),
        (PADDED, "slot_mapping_padded", 1, "r1", 1),
        (PADDED, "input_ids_padded", 6, None, None),  # padding
        (PADDED, "seq_lens", 1, "r1", None),
        (PADDED, "query_start_loc", 2, "r1", None),  # where it ends
        (PADDED, "logits_indices", 2, "r2", None),
        (PADDED, "discard_request_mask_padded", 0, "r0", None),
        (LATENT_SCENARIO, "latent.num_decodes", (), None, None),
        (LATENT_SCENARIO, "latent.num_chunks", (), None, None),
        (LATENT_SCENARIO, "prefill_query_start_loc_padded", 1, None, None),
        (LATENT_SCENARIO, "context_piece_reqs_padded", 1, None, None),
        (LATENT_SCENARIO, "context_piece_starts_padded", 2, None, None),
        (LATENT_SCENARIO, "context_piece_lens_padded", 0, None, None),
        (LATENT_SCENARIO, "context_piece_chunks_padded", 2, None, None),
        (SHARED, "slot_mapping", 1, "r1", 1),
        (SHARED, "block_offsets", 2, "r1", 2),
        (SHARED, "dcp.dcp_ranks", 3, None, None),
        (SHARED, "dcp_local_seq_lens_padded", 0, None, None),
        (SHARED, "dcp_local_context_lens_padded", 1, None, None),
    ],
)
def test_a_difference_is_found_and_named(tmp_path, scenario, name, index, req_id, token):
    record = record_of(parse_scenario(scenario).record().prepare())
    record = through_a_file(record, tmp_path)  # no two arrays share memory
    record.prepared[name][index] ^= 1
    say = [core_difference] + [oracle_difference] * (name != "discard_request_mask_padded")
    for found in (difference(record) for difference in say):
        assert (found.variable, found.index) == (name, () if index == () else (index,))
        assert found.recorded == found.expected ^ 1
        assert (found.req_id, found.token) == (req_id, token)


def test_groups_chunks_mrope_and_images_come_back(tmp_path):
    scenario = parse_scenario(several_groups())
    batch, padding = scenario.record().step_batch()
    batch.takes_embeds = True
    placeholders = Placeholders.of_rows([[(0, 2)], [], [(1, 3), (6, 7)]])
    step = prepare_step(batch, padding)
    record = through_a_file(record_of(step, GROUPS, placeholders=placeholders), tmp_path)
    assert record.settings.modalities == ["image"] * 3
    assert record.prepared["model_input"].tobytes() == b"inputs_embeds"
    assert record.prepared["mrope_positions"][:, -1].tolist() == [97, 98, 99]
    assert core_difference(record) is None and oracle_difference(record) is None
    restored = record.step()
    assert np.array_equal(restored.mrope_positions, step.mrope_positions)
    for name, array in step.local_requests(2).items():
        assert np.array_equal(restored.local_requests(2)[name], array)


def test_tokens_of_a_prompt_of_embeddings_have_no_id(tmp_path):
    """The table has one that is none, the device token 0; other ids of the request are compared."""
    scenario = parse_scenario(small())
    batch, padding = scenario.record().step_batch()
    batch.takes_embeds = True
    row, first = 2, int(batch.tables.num_computed_tokens[2])
    batch.tables.token_ids[row, first : first + 2] = 512
    step = prepare_step(batch, padding)
    start = int(step.query_start_loc[row])
    step.input_ids[start : start + 2] = 0  # `vllm_npu_prep.runner.prompt_embeds`
    record = through_a_file(record_of(step, rows_with_embeds=[row]), tmp_path)
    assert record.prepared["input_ids"][start : start + 2].tolist() == [0, 0]
    assert core_difference(record) is None and oracle_difference(record) is None
    step.input_ids[start + 2] += 1
    record = record_of(step, rows_with_embeds=[row])
    assert core_difference(record).index == oracle_difference(record).index == (start + 2,)
    step.input_ids[start + 2] -= 1
    assert core_difference(record_of(step)).index == (start,)  # a prompt of ids


def test_parts_of_the_settings_are_objects_of_the_same_keys():
    """Whatever the classes of the core have beside them."""
    of_latent, of_a_rank = (
        json.loads(parse_scenario(scenario).record().settings.model_dump_json())
        for scenario in (LATENT_SCENARIO, SHARED)
    )
    assert of_latent["latent"] == LATENT
    assert of_a_rank["dcp"] == {"world_size": 2, "rank": 1, "interleave_size": 2}


# ---------------------------------------------------------------------- hostile files


@pytest.fixture(scope="module")
def goods(tmp_path_factory):
    """A record of several groups, and one of latent attention."""
    path = tmp_path_factory.mktemp("hostile") / "step-000000.npz"
    made = [scenario_of(name) for name in ("several groups", "latent")]
    steps = [(parse_scenario(scenario).record().prepare(), groups) for scenario, groups in made]
    return [(record_of(step, groups).to_bytes(), path) for step, groups in steps]


@pytest.fixture(scope="module")
def good(goods):
    return goods[0]


def members_of(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_of(members: dict[str, bytes], compression=zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def with_members(content: bytes, **members: bytes) -> bytes:
    """An archive with other arrays, by their names."""
    named = {f"{name}.npy": member for name, member in members.items()}
    return archive_of(members_of(content) | named)


def npy(array: np.ndarray, **how) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **how)
    return buffer.getvalue()


def refusal(path, content: bytes) -> str | None:
    """The one line that a file is refused with; None if it is a record, which then replays."""
    path.write_bytes(content)
    try:
        record = read_record(path)
        core_difference(record), oracle_difference(record)
        record.step()
    except PrepError as error:
        line = str(error)
    else:
        return None
    assert "\n" not in line and len(line) < 600
    return line


@pytest.mark.parametrize("name", ["weights", "attn_mask.other", "kv_cache_groups.7.slot_mapping"])
@pytest.mark.parametrize("subcommand", ["replay", "explain"])
def test_an_array_that_no_record_holds_is_refused_by_its_name(good, name, subcommand, capsys):
    content, path = good
    path.write_bytes(with_members(content, **{name: npy(np.arange(3))}))
    assert main([subcommand, str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert f"{path}: holds {name}, which the record of such a step does not have" in err


def test_a_known_array_that_should_not_be_there_differs(tmp_path, capsys):
    """A recorder that went wrong wrote it: that is what a replay is for."""
    step = parse_scenario(worked_examples.load("decode-only")[0]).record().prepare()
    path = tmp_path / "step-000000.npz"
    mask = npy(np.zeros((1, 1), bool))
    path.write_bytes(with_members(record_of(step).to_bytes(), **{"attn_mask.masked": mask}))
    assert main(["replay", str(path)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("1 of 1 step differs, first in ")
    assert "attn_mask.masked: recorded an array, the core says none" in shown


def steps_in(folder: Path, *numbers: int) -> Path:
    step = parse_scenario(worked_examples.load("decode-only")[0]).record().prepare()
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        file = folder / f"step-{number:06d}.npz"
        file.write_bytes(record_of(step, number=number).to_bytes())
    return folder


@pytest.mark.parametrize("subcommand", ["replay", "explain"])
def test_a_missing_step_is_answered_with_those_that_are_there(subcommand, tmp_path, capsys):
    one = steps_in(tmp_path / "one", 542, 543, 544, 600)
    a, b = steps_in(tmp_path / "runs/a", 7), steps_in(tmp_path / "runs/b", 8)
    empty = steps_in(tmp_path / "empty")
    for folder, number, said in (
        (one, 3, f"--step 3 is not there: {one} holds steps 542 to 544, 600"),
        (a.parent, 9, f": {a} holds step 7; {b} holds step 8"),
        (empty, 1, "no step-000001.npz here"),
    ):
        assert main([subcommand, str(folder), "--step", str(number)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert main([subcommand, str(one), "--step", "543"]) == 0


def test_a_step_of_several_runs_is_explained_of_one(tmp_path, capsys):
    for run in ("a", "b"):
        steps_in(tmp_path / run, 7)
    assert main(["explain", str(tmp_path), "--step", "7"]) == 2
    assert "name the folder of one run" in capsys.readouterr().err


@given(st.data())
def test_flipped_bytes_and_cut_files_are_refused_or_differ(goods, data):
    content, path = goods[data.draw(st.integers(0, 1))]
    content = bytearray(content)
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 8))):
        if content:
            place = data.draw(st.integers(0, len(content) - 1))
            content[place] = data.draw(st.integers(0, 255))
    refusal(path, bytes(content))


@given(st.data())
def test_members_with_any_content_are_refused_or_differ(goods, data):
    content, path = goods[data.draw(st.integers(0, 1))]
    members = members_of(content)
    names = st.lists(st.sampled_from(sorted(members)), min_size=1, max_size=3, unique=True)
    for name in data.draw(names):
        kind = data.draw(st.sampled_from(["gone", "bytes", "values", "shape", "dtype", "text"]))
        if kind == "gone":
            del members[name]
        elif kind == "bytes":
            members[name] = data.draw(st.binary(max_size=200))
        elif kind == "text":
            text = bytearray(members.get("settings.npy", b""))
            if digits := [i for i, byte in enumerate(text) if 48 <= byte <= 57 and i > 128]:
                text[data.draw(st.sampled_from(digits))] = 48 + data.draw(st.integers(0, 9))
                members["settings.npy"] = bytes(text)
        else:
            array = np.load(io.BytesIO(members[name]), allow_pickle=False)
            if kind == "values" and array.size and array.dtype.kind == "i":
                value = data.draw(st.integers(0, 255) | st.sampled_from([-1, 2**31 - 1, -(2**31)]))
                array.reshape(-1)[data.draw(st.integers(0, array.size - 1))] = value
            elif kind == "shape":
                array = array.reshape(-1)[: data.draw(st.integers(0, 3))]
            elif kind == "dtype":
                types = st.sampled_from(["f8", "i2", "U5", "M8", "i8"])
                array = np.zeros(array.shape, data.draw(types))
            members[name] = npy(array)
    refusal(path, archive_of(members))


def test_what_a_file_claims_is_checked_before_memory_is_taken(good):
    content, path = good
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<i4', 'fortran_order': False, 'shape': (%s), }"
    huge = (header % b"99999999999999,").ljust(127) + b"\n"
    pickled = npy(np.array([{}], object), allow_pickle=True)
    hostile = {
        "a huge shape": with_members(content, positions=huge),
        "a bomb": with_members(content, positions=bytes(MAX_RECORD_BYTES)),
        "pickles": with_members(content, positions=pickled),
        "nested": archive_of({"x/../../positions.npy": b""}),
        "another compression": archive_of(members_of(content), zipfile.ZIP_LZMA),
        "no archive": b"PK" * 100,
        "empty": b"",
    }
    tracemalloc.start()
    try:
        for what, each in hostile.items():
            path.write_bytes(each)
            tracemalloc.reset_peak()
            with pytest.raises(PrepError) as error:
                read_record(path)
            assert "\n" not in str(error.value), what
            assert tracemalloc.get_traced_memory()[1] < 32 << 20, what
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 1}, "format 1; this version reads format 2: use the version of vllm_npu_prep"),
        ({"format": 3}, "format 3; this version reads format 2"),
        ({"max_model_len": 1 << 24, "max_num_reqs": 1 << 16}, "a token table of"),
        ({"num_reqs_padded": 1}, "more requests than num_reqs_padded"),
        ({"block_sizes": [2, 2]}, "a width of each block table"),
        ({"mode": "ALL"}, 'settings.mode: must be "NONE", "PIECEWISE" or "FULL", not "ALL"'),
        ({"surplus": 1}, "settings.surplus"),
        ({"max_drafts": 9}, "max_drafts"),
        ({"req_ids": ["a\nb", "c", "d"]}, "settings.req_ids.0: must hold printable"),
        ({"latent": LATENT | {"workspace_tokens": 7}}, "they consist of whole blocks of 4"),
        ({"latent": LATENT | {"workspace_tokens": 4}}, "context_piece_reqs_padded is"),
        ({"latent": LATENT | {"decode_threshold": 0}}, "settings.latent.decode_threshold"),
        (
            {"latent": dict.fromkeys(LATENT, 1), "max_model_len": 1 << 24},
            "values contradict each other: arrays of",
        ),
    ],
)
def test_settings_that_contradict_themselves_are_named(goods, change, says):
    content, path = goods["latent" in change]
    values = json.loads(np.load(io.BytesIO(members_of(content)["settings.npy"])).tobytes())
    text = np.frombuffer(json.dumps(values | change).encode(), np.uint8)
    assert says in (refusal(path, with_members(content, settings=npy(text))) or "")


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("num_computed_tokens", 0, 1 << 30),
        ("num_scheduled_tokens", 0, 0),
        ("num_scheduled_tokens", 0, -5),
        ("num_draft_tokens", 0, 7),
        ("num_tokens", 0, 0),
        ("num_blocks", (0, 0), 1 << 20),
        ("block_ids", 0, -1),
        ("block_ids", 0, (1 << 31) - 1),
        ("mrope_lengths", 0, 1 << 40),
        ("mrope_positions", (0, 0), -(1 << 62)),
    ],
)
def test_counts_that_lead_compiled_code_astray_are_refused(good, name, index, value):
    content, path = good
    array = np.load(io.BytesIO(members_of(content)[f"batch.{name}.npy"]))
    array[index] = value
    line = refusal(path, with_members(content, **{f"batch.{name}": npy(array)}))
    assert line is not None and "values contradict each other" in line
