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


def test_several_refusals_stay_together_to_the_end(file, monkeypatch, capsys):
    text = "2 things have to be changed:\n  --quantization fp8: no\n  --enable-sleep-mode: no"
    one_line.leave(text)

    def start():
        raise RuntimeError("see above")

    error = caught(one_line.raising_what_was_left(start))
    assert str(error) == text
    monkeypatch.setattr(one_line, "is_command_of_vllm", lambda: True)
    caught(one_line.OneLineErrors(), PrepError, error, None)
    assert capsys.readouterr().err == f"vllm_npu_prep: error: {text}\n"


def test_files_of_other_engines_and_hosts_are_not_touched(file, monkeypatch):
    theirs = file.with_name("vllm-npu-prep-1-x.refusal")
    theirs.write_text("theirs")
    monkeypatch.setenv(one_line.FILE_ENV_VAR, str(theirs))  # inherited
    one_line.share_file()
    assert (one_line.left(), theirs.read_text()) == (None, "theirs")
    mine = Path(os.environ[one_line.FILE_ENV_VAR])
    mine.unlink()  # as on another host
    one_line.leave(WHY)
    assert (one_line.left(), mine.exists()) == (None, False)


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


def test_what_a_rank_left_is_read_whole_while_another_writes(file):
    """The file is never seen empty in between: who reads it then finds the text of the first."""
    one_line.leave("the first rank's")
    with file.open() as reader:
        one_line.leave("the second rank's")
        assert reader.read() == "the first rank's"
    assert one_line.left() == "the second rank's"
    assert list(file.parent.glob(f"{file.name}*")) == [file]


def test_logs_have_texts_of_refusals_and_tracebacks_of_bugs():
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


def test_a_server_logs_what_the_engine_answered_in_one_line():
    answer = f"Call to wake_up method failed: {WHY}"
    shown = []
    for error in (Exception(answer), RuntimeError(answer), Exception("bug")):
        kind, value, trace = type(error), error, None
        record = logging.LogRecord("", logging.ERROR, "", 0, "in ASGI", (), (kind, value, trace))
        assert one_line.tell_answer(record)
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


WRONG_BY_FLAGS = [
    (ValueError("no such\n  model"), "no such model"),
    (KeyError("invalid parser"), "invalid parser"),
    (OSError("no config.json"), "no config.json"),
    (caught(lambda: Config(size=0)), "size: Input should be greater than or equal to 1"),
]


@pytest.mark.parametrize(
    ("error", "text"), WRONG_BY_FLAGS, ids=[text for _, text in WRONG_BY_FLAGS]
)
def test_what_vllm_says_of_flags_is_a_mistake_of_the_user(upstream, error, text):
    said = one_line.mistake_of(caught(upstream["create_engine_config"], raises, error))
    assert said == f"{text} (VLLM_LOGGING_LEVEL=DEBUG shows where)"


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("create_engine_config", (int, "x")),
        ("create_engine_config", (lambda: {}["x"],)),
        ("create_engine_config", (lambda: [a for a, b in [(1,)]],)),
        ("create_engine_config", (raises, RuntimeError("no device"))),
        ("serve", (raises, ValueError("of a request"))),
    ],
)
def test_what_failed_by_itself_or_later_is_a_bug(upstream, where, call):
    assert one_line.mistake_of(caught(upstream[where], *call)) is None


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


def test_the_hook_prints_tracebacks_of_bugs_and_other_programs(upstream, monkeypatch, capsys):
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


@pytest.mark.parametrize("which", [slice(2), slice(2, None)], ids=["of each kind", "others"])
def test_vllm_serve_ends_with_one_line_for_mistakes_of_its_user(tmp_path, which):
    model = str(make_model(tmp_path / "qwen3", num_hidden_layers=1))
    (tmp_path / "file").touch()
    small = ("--skip-tokenizer-init", "--max-model-len", "128")

    def configured(text: str) -> list[str]:
        return [model, "--additional-config", text, *small]

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        asked = {
            f"--port {port}: Address already in use": [model, "--port", str(port), *small],
            "2 things have to be changed": [
                *(model, "--enable-sleep-mode", "--sleep-mode-offload-cudagraph"),
                *("--enable-nccl-comm-suspend", *small),
            ],
            "/no/such/model": ["/no/such/model", *small],
            "not JSON": configured("{npu_prep"),
            "must be an object; write for example": configured("[1]"),
            '"npu_prep" must be an object': configured('{"npu_prep": 5}'),
            'no key "mask_budget" (did you mean "mask_budget_bytes"?)': configured(
                '{"npu_prep": {"mask_budget": 5}}'
            ),
            '"npu_prep.record.dir" = ': configured(
                f'{{"npu_prep": {{"record": {{"dir": "{tmp_path}/file/r"}}}}}}'
            ),
            "torch.float32": [model, "--quantization", "fp8", "--dtype", "float32", *small],
        }
        asked = dict([*asked.items()][which])
        command = [sys.executable, "-c", SERVE, str(tmp_path)]
        subprocess.run(command, input=repr([*asked.values()]), text=True, check=True)
    for number, message in enumerate(asked):
        text = (tmp_path / str(number)).read_text()
        *lines, end = text.splitlines()
        assert end == "ended with 2", text
        assert "Traceback" not in text
        (told,) = (i for i, line in enumerate(lines) if "error: " in line)
        assert message in lines[told], text
        said = lines[told + 1 :]
        assert [line[:4] for line in said] == (["  --"] * 2 if message[0] == "2" else []), text
        # Before vLLM logs more than which plugins there are
        if message == "not JSON" or "must be an object" in message:
            assert "non-default args" not in text
