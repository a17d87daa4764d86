"""`vllm serve` with Model Runner V2, which drafts: what needs no option of V1 on its servers."""

import json

import pytest

from tests.server import fields
from tests.server import test_server as of_v1
from tests.server.test_record import command
from tests.server.test_server import COMPLETIONS, QUESTIONS, XGRAMMAR, Server
from vllm_npu_prep.compat.v2 import RUNNER_ENV_VAR
from vllm_npu_prep.inspect.record_file import read_record, record_files


@pytest.fixture(scope="module")
def server(demo_model, demo_drafters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("v2")
    config = {"npu_prep": {"record": {"dir": str(folder / "records"), "steps": "last 40"}}}
    drafts = {"method": "eagle", "model": str(demo_drafters / "eagle"), "num_speculative_tokens": 3}
    server = Server(
        demo_model,
        folder / "log",
        *("--additional-config", json.dumps(config), "--structured-outputs-config", XGRAMMAR),
        *("--speculative-config", json.dumps(drafts), *fields.SERVED),
        **{RUNNER_ENV_VAR: "1"},
    )
    yield server
    server.kill()


def test_chats_and_metrics(server):
    """Each step is counted once, however many drafts it verified."""
    assert "[model_runner.py:" in server.log(), "of V2; V1's is gpu_model_runner.py"
    before, prompts = server.metrics(), [[*range(40, 53)], [*range(60, 97)]]
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": 9, "ignore_eos": True, "temperature": 0}
        assert server.request("POST", COMPLETIONS, body)[0] == 200
    after = server.metrics()
    counted = {name: after[name] - before.get(name, 0) for name in after}
    states, kinds = ["PrefillNoCache", "SpecDecoding"], ("graph_steps_total", "eager_steps_total")
    prompts_read, verified = (counted[f"steps_total attn_state={state}"] for state in states)
    assert (prompts_read, verified > 0) == (len(prompts), True)
    assert counted["prepare_time_seconds_count"] == sum(
        value for name, value in counted.items() if name.startswith("steps_total")
    )
    assert counted["prepare_time_seconds_count"] == sum(
        value for name, value in counted.items() if name.startswith(kinds)
    )
    of_v1.test_chat_answers_what_the_model_learned(server, 0)
    of_v1.test_thirty_two_concurrent_requests_do_not_mix(server)


@pytest.mark.parametrize("pairs", [fields.DOZEN, None], ids=["a dozen", "all pairs"])
@pytest.mark.parametrize("path", fields.FIELDS)
def test_fields_in_pairs_beside_drafts(server, demo_model, seed, path, pairs):
    fields.check(server, demo_model, path, pairs, seed, fields.REFUSED)


def test_streams_and_clients_that_hang_up(server, seed):
    of_v1.test_the_openai_client_example_prints_the_same_text_in_pieces(server)
    of_v1.test_clients_that_hang_up_leave_the_server_well(server, seed)


def test_forced_answers_and_seeds(server):
    of_v1.test_an_answer_is_forced_into_a_schema(server)
    of_v1.test_a_seeded_prompt_longer_than_the_budget_does_not_end_the_server(server)


def test_a_list_that_has_no_room_is_refused_and_nobody_else_notices(server):
    question, answer = QUESTIONS[1]
    body = {"prompt": "one, two,", "max_tokens": 4, "min_tokens": 2}
    status, told = server.request("POST", COMPLETIONS, {**body, "stop_token_ids": [*range(121)]})
    assert status == 400
    message = json.loads(told)["error"]["message"]
    assert "may have 120 tokens on Model Runner V2" in message and "\n" not in message
    assert server.request("POST", COMPLETIONS, {**body, "stop_token_ids": [*range(90)]})[0] == 200
    assert server.chat(question) == answer


def test_its_last_steps_are_recorded_and_replayed(server):
    of_v1.test_thirty_two_concurrent_requests_do_not_mix(server)
    code, text = command("record", str(server.port))
    assert (code, text.partition(" ")[0]) == (0, "40"), text
    (folder,) = (server.log_path.parent / "records").iterdir()
    files = record_files(folder)
    said = f"{len(files)} steps: core and oracle prepare what was recorded\n"
    assert command("replay", folder) == (0, said)
    records = [read_record(file) for file in files]
    assert any("is_on_device" in record.prepared for record in records)
    assert max(record.settings.num_reqs for record in records) > 4
