"""`vllm serve` that drafts: requests of every kind, and its last steps, recorded and replayed."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.waiting import LIMIT, wait_until
from tests.server import fields
from tests.server import test_server as of_plain
from tests.server.hostile import HOSTILE
from tests.server.test_server import QUESTIONS, XGRAMMAR, Server, check_all_gone
from vllm_npu_prep.inspect.record_file import read_record, record_files


def command(*words: str | Path) -> tuple[int, str]:
    """Exit code and output of ``vllm-npu-prep``."""
    words = (Path(sys.executable).with_name("vllm-npu-prep"), *words)
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=LIMIT)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def server(demo_model, demo_drafters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    config = {"npu_prep": {"record": {"dir": str(folder / "records"), "steps": "last 40"}}}
    drafts = {"method": "eagle", "model": str(demo_drafters / "eagle"), "num_speculative_tokens": 3}
    server = Server(
        demo_model,
        folder / "log",
        *("--additional-config", json.dumps(config), "--speculative-config", json.dumps(drafts)),
        *("--structured-outputs-config", XGRAMMAR, *fields.SERVED),
    )
    yield server
    server.kill()


@pytest.mark.parametrize("hostile", HOSTILE, ids=[each.advisory for each in HOSTILE])
def test_a_hostile_request_is_answered_beside_drafts(server, hostile):
    of_plain.test_a_hostile_request_is_answered_and_nobody_else_notices(server, hostile)


@pytest.mark.parametrize("pairs", [fields.DOZEN, None], ids=["a dozen", "all pairs"])
@pytest.mark.parametrize("path", fields.FIELDS)
def test_fields_in_pairs_beside_drafts(server, demo_model, seed, path, pairs):
    fields.check(server, demo_model, path, pairs, seed, fields.REFUSED | fields.REFUSED_BY_V1)


def test_every_field_of_vllm_has_a_value_or_a_reason_to_have_none():
    known = fields.VALUES.keys() | fields.LEFT_OUT.keys()
    assert known == {name for names in fields.FIELDS.values() for name in names}
    assert not fields.VALUES.keys() & fields.LEFT_OUT.keys()


def test_a_served_run_is_recorded_when_asked_and_replayed(server):
    """Asynchronous scheduling, graphs, a prefix that all questions share; and then a fault.

    At last the server is killed, which its engine notices.
    """
    records = server.log_path.parent / "records"
    (engine,) = (each for each in server.children if each.name() == "VLLM::EngineCore")
    try:
        asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(24)]
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda pair: server.chat(pair[0]), asked))
        assert answers == [answer for _, answer in asked]
        assert f"record        last 40, in {records}" in server.log()
        assert "; `vllm-npu-prep record` or `kill -USR1 " in server.log()
        code, text = command("record", str(server.port))
        (folder,) = records.iterdir()
        assert (code, text) == (0, f"40 steps are in {folder} (vllm-npu-prep record)\n")
        assert len(record_files(folder)) == 40
        for pid in (server.process.pid, engine.pid):
            before = len(record_files(folder))
            assert server.chat(QUESTIONS[0][0]) == QUESTIONS[0][1]
            os.kill(pid, signal.SIGUSR1)
            wait_until(lambda before=before: len(record_files(folder)) > before)
        nothing = f"no new step to write; those of this run are in {folder}"
        code, text = command("record", str(engine.pid), "--json")
        (rank,) = json.loads(text)["ranks"]
        assert (code, rank["steps"], rank["answer"]) == (1, 0, nothing)

        server.process.kill()
        check_all_gone(server)
        why = f"EngineCore stops: the process that started it (pid {server.process.pid}) is gone."
        assert why in server.log() and "it exits now" not in server.log()
    finally:
        server.kill()
    files = record_files(folder)
    assert command("replay", folder) == (
        0,
        f"{len(files)} steps: core and oracle prepare what was recorded\n",
    )
    records = [read_record(file) for file in files]
    assert any("is_on_device" in record.prepared for record in records)
    assert any(record.settings.num_reqs > 4 for record in records)

    file, record = files[7], records[7]
    record.prepared["positions"][0] += 1
    file.write_bytes(record.to_bytes())
    code, text = command("replay", folder)
    position = int(record.prepared["positions"][0])
    where = f"positions[0] (token 0, request {record.settings.req_ids[0]})"
    said = f"recorded {position}, the %s says {position - 1}\n"
    assert code == 1 and text.startswith(f"1 of {len(files)} steps differs, first in {file}\n")
    for by in ("core", "oracle"):
        assert f"step {record.number}: {where}: {said % by}" in text
