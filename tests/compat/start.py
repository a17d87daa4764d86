"""Import every module of the plugin and start it: what fails, a line each.

``python -m tests.compat.start MODEL`` does that, and says on standard error what vLLM says.
"""

import importlib
import os
import sys
import traceback
from collections import defaultdict
from pathlib import Path

from tests.compat.bodies import folder_of, modules

PLUGIN = "vllm_npu_prep"
PROMPTS = [list(range(5, 5 + n)) for n in (3, 40, 100)]
"""Longer together than a step may be."""


def failing_imports() -> list[str]:
    """Modules that don't import, by their error; those that need torch_npu are left out."""
    by_error: dict[str, list[str]] = defaultdict(list)
    for name, _ in modules(PLUGIN, folder_of(PLUGIN)):
        try:
            importlib.import_module(name)
        except Exception as error:
            if not (isinstance(error, ModuleNotFoundError) and error.name == "torch_npu"):
                by_error[_said(error)].append(name.removeprefix(f"{PLUGIN}."))
    return [f"import of {', '.join(names)}: {error}" for error, names in by_error.items()]


def failing_start(model: Path) -> list[str]:
    """Start an engine with graphs and let it generate: its error, or how its tokens are wrong."""
    from tests.helpers.engine import engine, generate, graphs, greedy
    from tests.helpers.huggingface import reference

    try:
        from vllm.platforms import current_platform

        if not type(current_platform).__module__.startswith(PLUGIN):
            return [f"start: {type(current_platform).__name__} is the platform, not the plugin's"]
        with engine(model, **graphs("FULL_AND_PIECEWISE", 4, 64)) as llm:
            tokens = generate(llm, PROMPTS, greedy(8))
    except (Exception, SystemExit) as error:
        return [f"start: {_said(error)}"]
    if tokens != reference(model, PROMPTS, 8):
        return ["start: tokens are not those of transformers"]
    return []


def _said(error: BaseException) -> str:
    """An error in one line, with the last place that is the plugin's or vLLM's."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f for f in frames if f"/{PLUGIN}/" in f.filename or "/vllm/" in f.filename]
    text = " ".join(str(error).split())
    where = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {text[:300]}{where}"


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints
    failures = [*failing_imports(), *failing_start(Path(sys.argv[1]))]
    print(*failures or ["the plugin starts"], sep="\n", file=out, flush=True)
    sys.exit(bool(failures))
