"""`vllm serve` that drafts, on either runner: fields in pairs, and its last steps recorded."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.command import command
from tests.server import fields, hostile
from tests.server.process import COMPLETIONS, FORKED, QUESTIONS, XGRAMMAR, Server
from vllm_npu_prep.compat.v2 import RUNNER_ENV_VAR
from vllm_npu_prep.records.record_file import read_record, record_files

REFUSED = {"V1": fields.REFUSED | fields.REFUSED_BY_V1, "V2": fields.REFUSED}


@pytest.fixture(scope="module", params=REFUSED)
def runner(request):
    return request.param


@pytest.fixture(scope="module")
def server(runner, demo_model, demo_drafters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    config = {"npu_prep": {"record": {"dir": str(folder / "records"), "steps": "last 40"}}}
    drafts = {"method": "eagle", "model": str(demo_drafters / "eagle"), "num_speculative_tokens": 3}
    server = Server(
        demo_model,
        folder / "log",
        *("--additional-config", json.dumps(config), "--speculative-config", json.dumps(drafts)),
        *("--structured-outputs-config", XGRAMMAR, *fields.SERVED),
        *("--cudagraph-capture-sizes", "8", "32"),
        **FORKED | {RUNNER_ENV_VAR: str(int(runner == "V2"))},
    )
    yield server
    server.kill()


def test_each_step_is_counted_once_however_many_drafts_it_has(server, runner):
    assert ("[model_runner.py:" in server.log()) == (runner == "V2")
    before, prompts = server.metrics(), [[*range(40, 53)], [*range(60, 97)]]
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": 9, "ignore_eos": True, "temperature": 0}
        assert server.request("POST", COMPLETIONS, body)[0] == 200
    after = server.metrics()
    counted = {name: after[name] - before.get(name, 0) for name in after}
    assert counted["steps_total attn_state=PrefillNoCache"] == len(prompts)
    assert counted["steps_total attn_state=SpecDecoding"] > 0
    steps = counted["prepare_time_seconds_count"]
    for kinds in ("steps_total", ("graph_steps_total", "eager_steps_total")):
        assert sum(value for name, value in counted.items() if name.startswith(kinds)) == steps


@pytest.mark.parametrize("request_", hostile.HOSTILE, ids=[each[0] for each in hostile.HOSTILE])
def test_a_hostile_request_is_answered_beside_drafts(sent, request_):
    status, told, others = sent[request_.advisory].result()
    assert status in request_.statuses, told
    assert others == QUESTIONS[4][1]


@pytest.mark.parametrize("pairs", [12, None], ids=["a dozen", "all pairs"])
@pytest.mark.parametrize("path", fields.FIELDS)
def test_fields_in_pairs_are_served(server, runner, demo_model, seed, path, pairs):
    made = fields.cases(path, demo_model, pairs, seed)
    answers = dict(zip((case.names for case in made), fields.ask(server, made), strict=True))
    failed = {n: a for n, a in answers.items() if not fields.statuses(*a) <= {200, 400, 422}}
    assert failed == {}
    alone = {names[0]: status for names, (status, _) in answers.items() if len(names) == 1}
    assert {n for n, status in alone.items() if status != 200} == REFUSED[runner] & alone.keys()
    of_pairs = [status for names, (status, _) in answers.items() if len(names) == 2]
    assert of_pairs.count(200) > len(of_pairs) / 2
    assert server.chat(QUESTIONS[0][0]) == QUESTIONS[0][1]


def test_every_field_of_vllm_has_a_value_or_a_reason_to_lack_one():
    left_out = {name for names in fields.LEFT_OUT.values() for name in names.split()}
    known = {name for names in fields.FIELDS.values() for name in names}
    assert fields.VALUES.keys() | left_out == known
    assert not fields.VALUES.keys() & left_out


def test_its_last_steps_are_recorded_when_asked_and_replayed(server):
    """Asynchronous scheduling, graphs, and a prefix that all questions share."""
    asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(24)]
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda pair: server.chat(pair[0]), asked))
    assert answers == [answer for _, answer in asked]
    assert "; `vllm-npu-prep record` or dump_steps writes them to " in server.log()
    done = command("record", server.port)
    (folder,) = server.log_path.parent.glob("records/*")
    assert done.stdout == f"40 steps are in {folder} (vllm-npu-prep record)\n"
    assert len(record_files(folder)) == 40
    (engine,) = (each for each in server.children if each.name() == "VLLM::EngineCore")
    (rank,) = json.loads(command("record", engine.pid, "--json").stdout)["ranks"]
    nothing = f"no new step to write; those of this run are in {folder}"
    assert (rank["steps"], rank["answer"]) == (0, nothing)

    files = record_files(folder)
    said = f"{len(files)} steps: core and oracle prepare what was recorded\n"
    assert command("replay", folder).stdout == said
    records = [read_record(file) for file in files]
    assert any("is_on_device" in record.prepared for record in records)
    assert max(record.settings.num_reqs for record in records) > 4


def test_an_engine_whose_server_is_killed_ends_by_itself(server):
    server.process.kill()
    assert server.left() == []
    why = f"EngineCore stops: the process that started it (pid {server.process.pid}) is gone."
    assert why in server.log() and "it exits now" not in server.log()
