"""Shows users in one line what they have to change, whichever process finds it.

vLLM starts an engine in a process of its own, and its ranks in further ones. Each process logs what
went wrong there with a traceback, down to the one that the user started, whose own traceback ends
with "see root cause above". A `PrepError` needs no traceback: the process that raises it leaves its
text in a file, and the first process prints it. Everything else, bugs above all, keeps its
tracebacks.

Nothing here patches vLLM; `compat` puts these functions in their places.
"""

import atexit
import contextlib
import dis
import functools
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError

from vllm_npu_prep.errors import PrepError

T = TypeVar("T")

FILE_ENV_VAR = "NPU_PREP_REFUSAL_FILE"
"""The environment variable that the main process sets for its children; it is not for users."""

EXIT_CODE = 2
"""The exit code of a process that ends because its user has to change something."""

LOGGERS = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.ray_executor_v2",
)
"""The loggers that report exceptions of engines and ranks."""

SERVER_LOGGER = "uvicorn.error"
"""The logger that reports the exceptions with which requests ended."""

STEP_CHECK = "step check "
"""The beginning of a `StepCheckError`, which the last line of a server repeats."""

CALL_FAILED = re.compile(r"Call to \w+ method failed: ")
"""The beginning of an engine's answer to a call that failed."""

CONFIGURING = {
    *("validate_parsed_serve_args", "setup_server"),
    *("from_cli_args", "create_engine_config"),
}
"""Functions of vLLM that check a command's flags: the user has to fix what they raise."""

OURS = "vllm_npu_prep."

MISTAKES = (ValueError, TypeError, KeyError, NotImplementedError, StrictDataclassError)
"""Exceptions that vLLM and transformers raise on purpose for bad flags and configs of models."""


# ----------------------------------------------------------------- between processes


def share_file() -> None:
    """Make the file in which child processes leave what they refuse, or empty it.

    It is called in the main process, which removes the file at its end.
    """
    prefix = f"vllm-npu-prep-{os.getpid()}-"  # an inherited one is another engine's
    if Path(os.environ.get(FILE_ENV_VAR, "")).name.startswith(prefix):
        leave("")
        return
    with contextlib.suppress(OSError):  # without room for a file, users see tracebacks
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=".refusal")
        os.close(handle)
        atexit.register(Path(name).unlink, missing_ok=True)
        os.environ[FILE_ENV_VAR] = name


def leave(text: str) -> None:
    """Leave the text of a `PrepError` to the main process, if it is on this host.

    The file is exchanged as a whole: ranks refuse at the same time, and the text of one may be read
    while another one leaves its own.
    """
    path = os.environ.get(FILE_ENV_VAR)
    if path is not None and os.path.exists(path):
        with contextlib.suppress(OSError):
            mine = Path(f"{path}.{os.getpid()}")
            mine.write_text(text)
            mine.replace(path)


def left() -> str | None:
    """Return the text that a process of this engine has left, if one has."""
    path = os.environ.get(FILE_ENV_VAR)
    with contextlib.suppress(OSError):
        return (path and Path(path).read_text()) or None
    return None


def leaving_refusals(function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function of a rank so that any `PrepError` that it raises or is given is left."""

    @functools.wraps(function)
    def leaving(*args: Any, **kwargs: Any) -> T:
        for each in args:
            if isinstance(each, PrepError):
                leave(str(each))
        try:
            return function(*args, **kwargs)
        except PrepError as error:
            leave(str(error))
            raise

    return leaving


def raising_what_was_left(function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function that starts processes: the text of one that refused becomes the error."""

    @functools.wraps(function)
    def raising(*args: Any, **kwargs: Any) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            text = refusal_of(error) or left()
            if text is None:
                raise
            executor = getattr(args[0], "model_executor", None) if args else None
            if executor is not None:  # running ranks are told to stop, and free shared resources
                with contextlib.suppress(Exception):
                    executor.shutdown()
            raise PrepError(text) from None

    return raising


def refusal_of(error: BaseException | None) -> str | None:
    """Return the text of the `PrepError` that an exception is or comes from; None if there is none.

    Ray wraps exceptions of its actors, with the original as ``cause``.
    """
    while error is not None:
        for each in (getattr(error, "cause", None), error):
            if isinstance(each, PrepError):
                return str(each)
        error = error.__cause__
    return None


@contextlib.contextmanager
def ending_without_traceback() -> Iterator[None]:
    """Run a vLLM process; a `PrepError` in it is left for the main process, and not logged."""
    try:
        yield
    except Exception as error:
        text = refusal_of(error)
        if text is None:
            raise
        leave(text)
        raise SystemExit(EXIT_CODE) from None


def tell_refusal(record: logging.LogRecord) -> bool:
    """Give a log record of a `PrepError` its text in place of the traceback."""
    text = refusal_of(record.exc_info[1]) if record.exc_info else None
    return _shortened(record, text and f"{record.getMessage()} {text}")


def tell_answer(record: logging.LogRecord) -> bool:
    """Give a log record of an API server the answer of an engine whose call failed.

    The engine is another process, and has logged its traceback or, for a `PrepError`, its text.
    The server's own traceback leads to where it waited. vLLM raises a plain `Exception` there
    (`_process_utility_output` in ``vllm/v1/engine/core_client.py``).
    """
    error = record.exc_info[1] if record.exc_info else None
    is_answer = type(error) is Exception and CALL_FAILED.match(str(error))
    return _shortened(record, str(error) if is_answer else None)


def _shortened(record: logging.LogRecord, text: str | None) -> bool:
    """Return True, as filters of `logging` do; a text takes the place of message and traceback."""
    if text is not None:
        record.msg, record.args = "%s", (text,)
        record.exc_info = record.exc_text = None
    return True


def log_refusals_in_one_line() -> None:
    for name in LOGGERS:
        logging.getLogger(name).addFilter(tell_refusal)
    logging.getLogger(SERVER_LOGGER).addFilter(tell_answer)


# ----------------------------------------------------------------- at the end of a command


class OneLineErrors:
    """An exception hook that prints one line for what the user has to change, else a traceback.

    The user has to change what a `PrepError` says, and in vLLM's own commands also what vLLM says
    about their flags. Those commands end with `EXIT_CODE`.
    """

    def __init__(self) -> None:
        self.previous = sys.excepthook

    def __call__(self, kind: type, error: BaseException, trace: TracebackType | None) -> None:
        is_command = is_command_of_vllm()
        if (text := refusal_of(error)) is not None:
            print(f"vllm_npu_prep: error: {text}", file=sys.stderr)
        elif is_command and (text := mistake_of(error)) is not None:
            if logging.getLogger("vllm").isEnabledFor(logging.DEBUG):
                self.previous(kind, error, trace)
            print(f"vllm: error: {text}", file=sys.stderr)
        else:
            self.previous(kind, error, trace)
            return
        if is_command:  # an interactive session continues
            raise SystemExit(EXIT_CODE)


def end_with(error: PrepError) -> NoReturn:
    """Print an error and end this process, where vLLM would swallow the exception."""
    print(f"vllm_npu_prep: error: {error}", file=sys.stderr)
    raise SystemExit(EXIT_CODE)


def is_command_of_vllm() -> bool:
    """Tell whether this process is a command such as ``vllm serve``, not somebody's program."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return "vllm.entrypoints.cli.main" in sys.modules or (
        spec is not None and spec.name.startswith("vllm.")
    )


def mistake_of(error: BaseException) -> str | None:
    """Say what is wrong with a command's flags, from an exception of vLLM; None if that isn't it.

    An exception is about flags if it was raised while flags were checked, and on purpose: by a
    ``raise``, by one of vLLM's validators, or by the system. Any other failing operation is a bug.
    """
    if not isinstance(error, (*MISTAKES, OSError)) or error.__traceback__ is None:
        return None
    steps = list(traceback.walk_tb(error.__traceback__))
    frames = {frame.f_code.co_name: frame for frame, _ in steps if _is_of_vllm(frame)}
    if not CONFIGURING & frames.keys():
        return None
    if text := _missing_folder(frames) or _socket_error(error, frames):
        return text
    if isinstance(error, ValidationError):
        text = "; ".join(_field(each["loc"]) + each["msg"] for each in error.errors())
        text = text.replace("Value error, ", "").replace("Assertion failed, ", "")
    elif isinstance(error, OSError) or _was_raised(error.__traceback__):
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    else:
        return None
    return f"{' '.join(text.split())} (VLLM_LOGGING_LEVEL=DEBUG shows where)"


def why_not_made(error: BaseException) -> str | None:
    """Return why vLLM's code of a model did not make it; None if this plugin's own code failed.

    A field that the model's config lacks is named, too: nobody raised that error on purpose, but it
    is the config that has to change.
    """
    if isinstance(error, PrepError) or error.__traceback__ is None:
        return None
    if isinstance(error, AttributeError) and hasattr(error.obj, "model_type"):
        return f"it reads {error.name}, which config.json lacks"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(str(frame.f_globals.get("__name__")).startswith(OURS) for frame in frames[1:]):
        return None
    at = [each for each in traceback.extract_tb(error.__traceback__) if "/vllm/" in each.filename]
    where = f"{at[-1].filename.rpartition('/vllm/')[2]}:{at[-1].lineno}" if at else "vLLM"
    return f"{' '.join(str(error).split()) or type(error).__name__} ({where})"


def _is_of_vllm(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("vllm.")


def _field(location: tuple[int | str, ...]) -> str:
    """Return ``--flag: `` for a field of vLLM's configuration; nothing without a location."""
    name = ".".join(str(part) for part in location)
    return f"{name}: " if name else ""


def _was_raised(trace: TracebackType) -> bool:
    """Tell whether the innermost frame stands at a ``raise``."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    operation = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]
    return operation in ("RAISE_VARARGS", "RERAISE")


def _missing_folder(frames: dict[str, FrameType]) -> str | None:
    """Name a model's folder that doesn't exist; vLLM would ask Hugging Face for it."""
    for function, name in (("from_cli_args", "args"), ("create_engine_config", "self")):
        if function in frames:
            model = getattr(frames[function].f_locals.get(name), "model", None)
            is_path = str(model).startswith(("/", ".", "~")) or str(model).count("/") > 1
            if model and is_path and not os.path.exists(model):
                return f"{model}: no such folder; give one with a model, or a name on Hugging Face"
    return None


def _socket_error(error: BaseException, frames: dict[str, FrameType]) -> str | None:
    if not isinstance(error, OSError):
        return None
    if frame := frames.get("create_server_unix_socket"):
        return f"--uds {frame.f_locals.get('path')}: {error.strerror}; give another path"
    if frame := frames.get("create_server_socket"):
        host, port = frame.f_locals.get("addr", ("", "?"))
        given = f"--host {host} --port {port}" if host else f"--port {port}"
        return f"{given}: {error.strerror}; give another one, or end what listens there"
    return None
