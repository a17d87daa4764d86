"""What users have to change reaches them as one line; bugs keep their tracebacks."""

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from tests.helpers.engine import make_model
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.server import one_line

WHY = "record.dir: no such disk; give another one"


def caught(function, *args) -> BaseException:
    with pytest.raises(BaseException) as error:  # noqa: PT011 - whatever it is
        function(*args)
    return error.value


def raises(error: BaseException, cause: BaseException | None = None):
    raise error from cause


@pytest.fixture
def file(monkeypatch, tmp_path):
    monkeypatch.setattr(one_line.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(one_line.FILE_ENV_VAR, "")
    one_line.share_file()
    return Path(os.environ[one_line.FILE_ENV_VAR])


class ActorError(RuntimeError):
    """As Ray raises what an actor of its raised."""

    cause = PrepError(WHY)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PrepError(WHY), WHY),
        (caught(raises, RuntimeError("layer 3"), PrepError(WHY)), WHY),
        (ActorError("a traceback"), WHY),
        (RuntimeError(WHY), None),
        (caught(raises, RuntimeError("bug"), KeyError("x")), None),
    ],
    ids=["itself", "as a cause", "from an actor", "another", "another's cause"],
)
def test_a_refusal_is_found_in_what_it_became(error, text):
    assert one_line.refusal_of(error) == text


def test_a_bug_while_a_refusal_is_handled_is_a_bug():
    def handle():
        try:
            raise PrepError(WHY)
        except PrepError:
            raise KeyError("bug")  # noqa: B904 - that is the point

    assert one_line.refusal_of(caught(handle)) is None


def test_a_process_that_refuses_leaves_why_and_ends_quietly(file):
    def start(error):
        with one_line.ending_without_traceback():
            raise error

    assert caught(start, PrepError(WHY)).code == 2
    assert file.read_text() == WHY
    assert isinstance(caught(start, ValueError("bug")), ValueError)


def test_who_started_processes_raises_what_one_of_them_left(file):
    def start(error):
        raise error

    start = one_line.raising_what_was_left(start)
    assert isinstance(caught(start, RuntimeError("see above")), RuntimeError)
    one_line.leave(WHY)
    error = caught(start, RuntimeError("see above"))
    assert isinstance(error, PrepError) and str(error) == WHY
    assert error.__suppress_context__
    one_line.share_file()  # another engine of this process
    assert Path(os.environ[one_line.FILE_ENV_VAR]) == file
    assert isinstance(caught(start, RuntimeError("see above")), RuntimeError)


def test_several_refusals_stay_together_between_processes_and_at_the_end(file, monkeypatch, capsys):
    text = "2 things have to be changed:\n  --quantization fp8: no\n  --enable-sleep-mode: no"
    one_line.leave(text)

    def start():
        raise RuntimeError("see above")

    error = caught(one_line.raising_what_was_left(start))
    assert str(error) == text
    monkeypatch.setattr(one_line, "is_command_of_vllm", lambda: True)
    caught(one_line.OneLineErrors(), PrepError, error, None)
    assert capsys.readouterr().err == f"vllm_npu_prep: error: {text}\n"


def test_an_inherited_file_is_another_engines(file, monkeypatch):
    theirs = file.with_name("vllm-npu-prep-1-x.refusal")
    theirs.write_text("theirs")
    monkeypatch.setenv(one_line.FILE_ENV_VAR, str(theirs))
    one_line.share_file()
    assert one_line.left() is None
    assert theirs.read_text() == "theirs"


def test_a_host_without_the_file_gets_none(file):
    file.unlink()
    one_line.leave(WHY)
    assert not file.exists()
    assert one_line.left() is None


def test_ranks_leave_what_they_raise_and_what_they_answer(file):
    answered = []

    @one_line.leaving_refusals
    def answer(output):
        answered.append(output)
        if output == "load":
            raise PrepError("raised")

    answer(PrepError(WHY))
    assert file.read_text() == WHY
    assert len(answered) == 1
    assert isinstance(caught(answer, "load"), PrepError)
    assert file.read_text() == "raised"


def test_what_a_rank_left_is_read_whole_while_another_leaves_its_own(file):
    """The file is never seen empty in between: who reads it then finds the text of the first."""
    one_line.leave("the first rank's")
    with file.open() as reader:
        one_line.leave("the second rank's")
        assert reader.read() == "the first rank's"
    assert one_line.left() == "the second rank's"
    assert list(file.parent.glob(f"{file.name}*")) == [file]


def test_logs_have_the_text_of_a_refusal_and_the_traceback_of_a_bug():
    class Handler(logging.Handler):
        emit = staticmethod(lambda record: records.append(record))

    records, handler = [], Handler()
    logger = logging.getLogger("vllm.v1.engine.core")
    before = list(logger.filters)
    try:
        one_line.log_refusals_in_one_line()
        one_line.log_refusals_in_one_line()
        assert len(logger.filters) <= len(before) + 1
        logger.addHandler(handler)
        for error in (PrepError("100% of it"), ValueError("bug")):
            try:
                raise error
            except Exception:
                logger.exception("%s failed", "20%")
    finally:
        logger.filters[:] = before
        logger.removeHandler(handler)
    refused, bug = records
    assert refused.getMessage() == "20% failed 100% of it"
    assert refused.exc_info is None
    assert bug.exc_info[1].args == ("bug",)


def test_a_server_logs_what_the_engine_answered_and_no_traceback_of_its_own():
    answer = f"Call to wake_up method failed: {WHY}"
    shown = []
    for error in (Exception(answer), RuntimeError(answer), Exception("bug")):
        kind, value, trace = type(error), error, None
        record = logging.LogRecord("", logging.ERROR, "", 0, "in ASGI", (), (kind, value, trace))
        assert one_line.OneLineAnswers().filter(record)
        shown.append((record.getMessage(), record.exc_info is None))
    assert shown == [(answer, True), ("in ASGI", False), ("in ASGI", False)]


# ----------------------------------------------------------------- mistakes in vLLM's flags

UPSTREAM = """
def create_engine_config(function, *args):
    return function(*args)

def serve(function, *args):
    return function(*args)

def create_server_socket(addr):
    import socket
    socket.socket().bind(addr)

def setup_server(addr):
    create_server_socket(addr)
"""


@pytest.fixture(scope="module")
def upstream():
    names = {"__name__": "vllm.entrypoints.of_a_test"}
    exec(UPSTREAM, names)  # a module of vLLM, as far as its frames tell
    return names


class Config(BaseModel):
    size: int = Field(ge=1)


def test_what_vllm_says_of_flags_is_a_mistake_of_the_user(upstream):
    def mistake(error):
        return one_line.mistake_of(caught(upstream["create_engine_config"], raises, error))

    shown = " (VLLM_LOGGING_LEVEL=DEBUG shows where)"
    assert mistake(ValueError("no such\n  model")) == "no such model" + shown
    assert mistake(KeyError("invalid parser")) == "invalid parser" + shown
    assert mistake(OSError("no config.json")) == "no config.json" + shown
    wrong = caught(upstream["create_engine_config"], lambda: Config(size=0))
    assert one_line.mistake_of(wrong) == (
        "size: Input should be greater than or equal to 1" + shown
    )


def test_what_failed_by_itself_or_later_is_a_bug(upstream):
    def mistake(where, function, *args):
        return one_line.mistake_of(caught(upstream[where], function, *args))

    assert mistake("create_engine_config", int, "x") is None
    assert mistake("create_engine_config", lambda: {}["x"]) is None
    assert mistake("create_engine_config", lambda: [a for a, b in [(1,)]]) is None
    assert mistake("create_engine_config", raises, RuntimeError("no device")) is None
    assert mistake("serve", raises, ValueError("of a request")) is None
    assert one_line.mistake_of(caught(raises, ValueError("nobody's"))) is None


def test_a_port_that_is_taken_is_named(upstream):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = caught(upstream["setup_server"], ("127.0.0.1", port))
    assert one_line.mistake_of(error) == (
        f"--host 127.0.0.1 --port {port}: Address already in use; "
        "give another one, or end what listens there"
    )


def test_the_hook_prints_tracebacks_of_bugs_and_of_programs_that_are_not_vllms(
    upstream, monkeypatch, capsys
):
    hook, shown = one_line.OneLineErrors(), []
    hook.previous = lambda *args: shown.append(args)

    def report(error):
        return hook(type(error), error, error.__traceback__)

    mistake = caught(upstream["create_engine_config"], raises, ValueError("bad flag"))
    monkeypatch.setattr(one_line, "is_command_of_vllm", lambda: False)
    report(caught(raises, PrepError(WHY)))  # and the session goes on
    report(mistake)
    assert capsys.readouterr().err == f"vllm_npu_prep: error: {WHY}\n"
    assert [kind for kind, *_ in shown] == [ValueError]
    monkeypatch.setattr(one_line, "is_command_of_vllm", lambda: True)
    assert caught(report, caught(raises, PrepError(WHY))).code == 2
    assert caught(report, mistake).code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"vllm_npu_prep: error: {WHY}"
    assert said[1].startswith("vllm: error: bad flag (")
    report(caught(raises, KeyError("bug")))
    assert [kind for kind, *_ in shown] == [ValueError, KeyError]


# ----------------------------------------------------------------- vllm serve

SERVE = """
import os, sys
import vllm.entrypoints.cli.serve
from vllm.entrypoints.cli.main import main

*commands, = eval(sys.stdin.read())
for number, flags in enumerate(commands):
    child = os.fork()
    if not child:
        out = os.open(f"{sys.argv[1]}/{number}", os.O_CREAT | os.O_WRONLY)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.argv[:] = ["vllm", "serve", *flags]
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(f"{sys.argv[1]}/{number}", "a") as file:
        file.write(f"ended with {code}")
else:
    os._exit(0)
main()
"""
"""Imports once, and runs ``vllm serve`` with each list of flags in a process of its own."""


def test_vllm_serve_ends_with_one_line_for_what_its_user_has_to_change(tmp_path):
    model = make_model(tmp_path / "qwen3", num_hidden_layers=1)
    taken = socket.socket()
    taken.bind(("", 0))
    taken.listen()
    port = taken.getsockname()[1]
    (tmp_path / "file").touch()
    small = ("--skip-tokenizer-init", "--max-model-len", "128")
    config = "--additional-config"
    asked = {
        f"--port {port}: Address already in use": [str(model), "--port", str(port), *small],
        "/no/such/model": ["/no/such/model", *small],
        "not JSON": [str(model), config, "{npu_prep", *small],
        "must be an object; write for example": [str(model), config, "[1]", *small],
        '"npu_prep" must be an object': [str(model), config, '{"npu_prep": 5}', *small],
        'no key "mask_budget" (did you mean "mask_budget_bytes"?)': [
            *(str(model), config, '{"npu_prep": {"mask_budget": 5}}', *small)
        ],
        '"npu_prep.record.dir" = ': [
            *(str(model), config, f'{{"npu_prep": {{"record": {{"dir": "{tmp_path}/file/r"}}}}}}'),
            *small,
        ],
        "torch.float32": [str(model), "--quantization", "fp8", "--dtype", "float32", *small],
    }
    several = [
        "vllm_npu_prep: error: 2 things have to be changed:",
        "  --sleep-mode-offload-cudagraph is not supported",
        "  --enable-nccl-comm-suspend is not supported",
    ]
    sleeping = ["--enable-sleep-mode", "--sleep-mode-offload-cudagraph"]
    flags = [str(model), *sleeping, "--enable-nccl-comm-suspend", *small]
    early = 3  # of these vLLM logs nothing but which plugins there are
    with taken:
        subprocess.run(
            [sys.executable, "-c", SERVE, str(tmp_path)],
            input=repr([*asked.values(), flags]),
            text=True,
            check=True,
        )
    for number, message in enumerate(asked):
        text = (tmp_path / str(number)).read_text()
        *_, last, end = text.splitlines()
        assert message in last, text
        assert "error: " in last and end == "ended with 2", text
        assert "Traceback" not in text
        if 2 <= number < 2 + early:
            assert "non-default args" not in text
    *_, first, second, third, end = (tmp_path / str(len(asked))).read_text().splitlines()
    for line, start in zip((first, second, third), several):
        assert line.startswith(start)
    assert end == "ended with 2"
