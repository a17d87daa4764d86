"""Asks start-up for an engine of one architecture, in a forked child, and tells what came of it."""

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import traceback
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.engine import save_tokenizer
from tests.registry import tiny
from vllm_npu_prep.compat.v2 import RUNNER_ENV_VAR

PROMPTS = [[5, 17, 300, 41, 8, 99, 120], [7, 3, 250, 11, 480, 64, 2, 33, 19, 77, 150]]
NEW_TOKENS = 4
SECONDS = 300
"""After which a child counts as hanging: generous, as others may use the machine."""

LACKING = re.compile(
    r"it reads (\w+), which config|(\w+) not exist|Config' object has no attribute '(\w+)'"
)
OF_WEIGHTS = re.compile(r"model_loader/|load_weights|weight_loader|parameter\.py")
NEEDS_FILES = re.compile(
    r"Can't load \w+ processor|preprocessor_config\.json|processor_config|not found at|sees"
)

WARM = (
    "torch.fx",
    "transformers.models.llama.modeling_llama",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm_npu_prep.worker",
    "vllm_npu_prep.runner.v1.runner",
)
"""Modules that most children need: imported once, before they are forked."""

SETTINGS = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "seed": 0,
}


@dataclass(frozen=True)
class Came:
    """What came of an architecture.

    It was ``served``, ``refused`` (by this plugin), ``refused by vLLM``, ``not made`` or is a
    ``fault``; `how` tells against what tokens were held, who refused it and why, or the error,
    whose last lines of a traceback are `where`.
    """

    what: str
    how: str
    where: str = ""


def ask(architecture: str) -> Came:
    """Make a tiny model of an architecture, and ask for an engine, in this process."""
    folder = Path(tempfile.mkdtemp(prefix="registry-"))
    try:
        config = tiny.tiny_config(architecture)
        reference = tiny.save_model(folder, architecture, config)
        save_tokenizer(folder)
        return _without_paths(_with_fields(folder, reference), folder)
    except tiny.CannotBeMadeError as error:
        return Came("not made", str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _without_paths(came: Came, folder: Path) -> Came:
    """The same on every machine."""
    outside = re.compile(r'(/[^\s/"]+)+/(?=site-packages/|tests/|vllm_npu_prep/)')
    said = (text.replace(str(folder), "MODEL") for text in (came.how, came.where))
    return Came(came.what, *(outside.sub("", text) for text in said))


def _with_fields(folder: Path, reference: Any) -> Came:
    """Ask, and again with each field that vLLM missed in the config and `tiny.field_of` knows.

    Where vLLM doesn't read what transformers' class of it has written, weights are made up.
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    load, added = "auto" if reference else "dummy", set()
    while True:
        came = _ask(folder, reference if load == "auto" else None, load_format=load)
        missed = LACKING.search(f"{came.how} {came.where}")
        name = next((each for each in missed.groups() if each), "") if missed else ""
        known = bool(name) and tiny.field_of(name) is not None
        if came.what != "served" and known and name not in added:
            added.add(name)
            tiny.add_field(folder, name)
        elif came.what == "fault" and load == "auto" and OF_WEIGHTS.search(came.where):
            load = "dummy"
        elif came.what == "fault" and came.how.startswith("start-up: ") and name:
            return Came("not made", f"transformers' config of it lacks {name}, which vLLM reads")
        elif came.what in ("fault", "refused by vLLM") and NEEDS_FILES.search(came.how):
            return Came("not made", "it needs files of a processor")
        else:
            return came
        cleanup_dist_env_and_memory()


def _ask(folder: Path, reference: Any, **settings: Any) -> Came:
    from vllm.engine.arg_utils import EngineArgs

    from tests.helpers.engine import inspect_models_here
    from vllm_npu_prep.errors import PrepError
    from vllm_npu_prep.server.one_line import mistake_of, refusal_of

    inspect_models_here()
    refused: list[str] = []
    settings = {**SETTINGS, **settings}
    with _noting(refused):
        try:
            config = EngineArgs(model=str(folder), **settings).create_engine_config()
        except PrepError as error:
            lines = str(error).splitlines()
            return Came("refused", " ".join(refused), lines[0] if len(lines) == 1 else str(error))
        except Exception as error:
            if (text := mistake_of(error)) is not None:
                return Came("refused by vLLM", text)
            return Came("fault", "start-up: " + tiny.first_line(error), _where())
    pools = config.model_config.runner_type == "pooling"
    if config.model_config.is_multimodal_model:  # no files of a processor are made
        settings |= {"language_model_only": True}
    loaded: list[str] = []
    try:
        with _noting_loads(loaded):
            return _served(folder, settings, reference)
    except Exception as error:
        text = refusal_of(error)
        if text is not None and not loaded and "\n" not in text:
            return Came("refused", "while layers are made", text)
        if pools and "language_model_only" in settings:
            return Came("fault", f"it sees, and pools no text alone: {tiny.first_line(error)}")
        return Came("fault", tiny.first_line(error), _where())


def _where() -> str:
    return "".join(traceback.format_exc().splitlines(keepends=True)[-14:])


def _noting(refused: list[str]) -> Any:
    """Note what start-up refuses."""
    from vllm_npu_prep import platform
    from vllm_npu_prep.startup.refusals import refusals_that_apply, refuse_unsupported

    def refuse(*asked: Any) -> None:
        refused[:] = refusals_that_apply(*asked)
        refuse_unsupported(*asked)

    return mock.patch.object(platform, "refuse_unsupported", refuse)


@contextlib.contextmanager
def _noting_loads(loaded: list[str]) -> Any:
    """Note when weights are first loaded, by whichever loader."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    with contextlib.ExitStack() as patches:
        for loader in (DefaultModelLoader, DummyModelLoader):
            load = functools.partialmethod(_note_and_load, loaded, loader.load_weights)
            patches.enter_context(mock.patch.object(loader, "load_weights", load))
        yield


def _note_and_load(loader: Any, loaded: list[str], load: Any, *args: Any, **more: Any) -> Any:
    loaded.append(type(loader).__name__)
    return load(loader, *args, **more)


def _served(folder: Path, settings: dict[str, Any], reference: Any) -> Came:
    """Serve two prompts twice: values are numbers, the same each time, and the tokens right."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), **settings)
    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=1
    )
    inputs, task = [{"prompt_token_ids": prompt} for prompt in PROMPTS], llm.pooling_task

    def served() -> tuple[list[Any], torch.Tensor]:
        """Tokens, and their scores; or what is pooled."""
        if task is not None:
            outputs = llm.encode(inputs, pooling_task=task, use_tqdm=False)
            rows = [torch.as_tensor(each.outputs.data).float().flatten() for each in outputs]
            return [row.tolist() for row in rows], torch.cat(rows)
        outputs = [each.outputs[0] for each in llm.generate(inputs, params, use_tqdm=False)]
        places = [place for each in outputs for place in each.logprobs]
        scores = [score.logprob for place in places for score in place.values()]
        return [list(each.token_ids) for each in outputs], torch.tensor(scores)

    (first, scores), (second, _) = served(), served()
    if not scores.isfinite().all():
        return Came("fault", "values that are no numbers")
    if first != second:
        return Came("fault", f"another result at the second time: {first} {second}"[:300])
    if task is not None:
        return Came("served", f"pools ({task})")
    try:
        expected = _best_behind(reference, first) if reference else None
    except Exception as error:  # where its class fails
        return Came("served", "tokens twice the same", tiny.first_line(error))
    if expected not in (None, first):
        return Came("fault", f"tokens {first}, those of transformers {expected}")
    return Came("served", "tokens of transformers" if expected else "tokens twice the same")


def _best_behind(model: Any, tokens: list[list[int]]) -> list[list[int]]:
    """The most probable tokens by transformers in the place of each, behind those before it."""
    import torch

    best = []
    for prompt, got in zip(PROMPTS, tokens):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + got]), use_cache=False).logits
        best.append(logits[0, len(prompt) - 1 : -1].argmax(-1).tolist())
    return best


def _child(architecture: str, to: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    gc.disable()  # what a short life leaves goes with it
    gc.collect = lambda *_: 0
    os.environ[RUNNER_ENV_VAR] = "0"  # the page says what V1 answers
    try:
        came = FAULTS[architecture]() if architecture in FAULTS else ask(architecture)
    except BaseException as error:
        came = Came("fault", tiny.first_line(error), _where())
    to.send(asdict(came))
    to.close()
    os._exit(0)


FAULTS: dict[str, Any] = {
    "no architecture: dies": lambda: os._exit(3),
    "no architecture: hangs": lambda: signal.pause(),
}
"""What stands for an architecture in tests of the walk itself."""


def prepare() -> None:
    """Import what each child needs, once."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    for module in WARM:
        importlib.import_module(module)


def in_child(architecture: str) -> Came:
    """Ask for an architecture in a child, forked from this process, that may die or hang."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(architecture, its))
    child.start()
    its.close()
    seconds = 5 if architecture in FAULTS else SECONDS
    try:
        if not mine.poll(seconds):
            return Came("fault", f"no answer after {seconds} seconds")
        return Came(**mine.recv())
    except EOFError:
        child.join()
        return Came("fault", f"its process ended with exit code {child.exitcode}")
    finally:
        child.kill()
        child.join()
