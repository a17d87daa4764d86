"""Where the start of an engine goes: processor time by phase, and how much of it is the plugin's.

    python benchmarks/start_up.py [--model PATH] [--runs 3] [--json] [-- flags of the engine]

Seconds are the process's own, of all its threads: other work on the machine changes them less than
the clock's. Each run is a process of its own, in which `import vllm` is measured, too: that is
upstream's and the same in every version of the plugin, so ratios to it can be compared. Byte code
and numba's cache have to be there; the first run is thrown away.
"""

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
UNIT = "import vllm"
FLAGS = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16"]


class Clock:
    """Processor seconds by phase; what one phase calls of another is the other's alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.collecting: dict[str, float] = {}
        self.open: list[list] = []  # name, began, seconds of phases inside
        gc.callbacks.append(self._on_collection)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as this phase."""
        self.open.append([name, time.process_time(), 0.0])
        try:
            yield
        finally:
            _, began, inside = self.open.pop()
            spent = time.process_time() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - inside
            if self.open:
                self.open[-1][2] += spent

    def watch(self, owner: object, method: str, name: str) -> None:
        """Count each call of a method as a phase."""
        setattr(owner, method, self.phase(name)(getattr(owner, method)))

    def _on_collection(self, when: str, info: dict) -> None:
        if when == "start":
            self.collection_began = time.process_time()
        elif self.open:
            name = self.open[-1][0]
            spent = time.process_time() - self.collection_began
            self.collecting[name] = self.collecting.get(name, 0.0) + spent


def measure(model: str, flags: list[str]) -> dict[str, list[float]]:
    """Start an engine in this process: seconds of each phase, and of its garbage collections."""
    clock = Clock()
    with clock.phase(UNIT):
        import vllm
    with clock.phase("import the rest of vLLM"):
        import vllm.entrypoints.cli.main  # noqa: F401 (as processes of a server do)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.worker import gpu_worker  # noqa: F401
    with clock.phase("plugin: import its worker"):
        from vllm_npu_prep import worker
        from vllm_npu_prep.compat import activation
        from vllm_npu_prep.runner.common import CommonRunner
        from vllm_npu_prep.runner.graphs import Graphs
    for owner, method, name in (
        (activation, "prepare_process", "plugin: prepare the process"),
        (current_platform, "check_and_update_config", "plugin: check the config"),
        (worker.NPUWorker, "init_device", "make the device and the runner"),
        (worker.NPUWorker, "load_model", "load the model"),
        (worker.NPUWorker, "determine_available_memory", "run the largest step, with Dynamo"),
        (CommonRunner, "warm_up", "plugin: load compiled code"),
        (Graphs, "capture", "plugin: fake graphs"),
    ):
        clock.watch(owner, method, name)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", model, *FLAGS, *flags])
    with clock.phase("the rest: config, scheduler, KV cache"):
        engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    found = {name: [clock.seconds[name], clock.collecting.get(name, 0.0)] for name in clock.seconds}
    del engine  # held until here: its end is no part of the start
    return found


def main() -> None:
    """Measure in processes of their own, print medians and ratios."""
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        default=str(ROOT / ".cache" / "tiny-qwen3"),
        help="folder of a model (default: the demo model)",
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="starts of each kind (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args, flags = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    if args.one:
        print(json.dumps(measure(args.model, flags)))
        return
    environment = os.environ | {
        **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"},
        **{"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
    }
    command = [sys.executable, __file__, "--one", "--model", args.model, "--", *flags]
    runs = []
    for _ in range(args.runs + 1):
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    del runs[0]
    if args.json:
        for run in runs:
            print(json.dumps(run))
        return
    width = max(map(len, runs[0]))
    print(f"{'seconds of the processor':{width}}  total  collecting  total, of `{UNIT}`")
    for run in runs:
        run["together"] = [sum(each) for each in zip(*run.values())]
    for name in runs[0]:
        seconds, collecting = (median(run[name][i] for run in runs) for i in (0, 1))
        ratio = median(run[name][0] / run[UNIT][0] for run in runs)
        print(f"{name:{width}}  {seconds:5.2f}  {collecting:10.2f}  {ratio:5.2f}")


if __name__ == "__main__":
    main()
