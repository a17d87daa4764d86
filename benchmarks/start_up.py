"""Where the start of an engine goes: processor time by phase, and how much of it is the plugin's.

    python benchmarks/start_up.py [--model PATH] [--runs 3] [--json] [-- flags of the engine]

Seconds are the process's own, of all its threads: other work on the machine changes them less than
the clock's. Each run is a process of its own, in which `import vllm` is measured, too: that is
upstream's and the same in every version of the plugin, so ratios to it can be compared. Byte code
and numba's cache have to be there; the first run is thrown away.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
UNIT = "import vllm"
FLAGS = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16"]
WORKER = {
    "init_device": "device, process group, kernels, runner",
    "load_model": "load the model",
    "determine_available_memory": "largest step, traced by Dynamo",
    "compile_or_warm_up_model": "compiled code, graphs",
}
OURS = (
    "plugin: choose the platform, prepare a process",
    "plugin: import its worker",
    "plugin: check the config",
    "plugin: load compiled code",
    "plugin: graphs of the stand-in",
)


class Clock:
    """Processor seconds by phase; what one phase calls of another is the other's alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.open: list[list] = []  # name, began, seconds of phases inside

    def begin(self, name: str) -> None:
        self.open.append([name, time.process_time(), 0.0])

    def end(self) -> None:
        name, began, inside = self.open.pop()
        spent = time.process_time() - began
        self.seconds[name] = self.seconds.get(name, 0.0) + spent - inside
        if self.open:
            self.open[-1][2] += spent

    def watch(self, owner: object, method: str, name: str) -> None:
        """Count each call of a method as a phase."""
        upstream = getattr(owner, method)

        def watched(*args, **kwargs):
            self.begin(name)
            try:
                return upstream(*args, **kwargs)
            finally:
                self.end()

        setattr(owner, method, watched)

    def on_collection(self, phase: str, info: dict) -> None:
        """Garbage collections that somebody asked for are full ones."""
        if info["generation"] == 2:
            self.begin("full garbage collections") if phase == "start" else self.end()


def measure(model: str, flags: list[str]) -> dict[str, float]:
    """Start an engine in this process, and stop it."""
    clock = Clock()
    gc.callbacks.append(clock.on_collection)
    clock.begin(UNIT)
    import vllm  # noqa: F401

    clock.end()
    clock.begin("import the rest of vLLM")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker import gpu_worker  # noqa: F401

    clock.end()
    clock.begin("plugin: import its worker")
    from vllm_npu_prep import compat, worker
    from vllm_npu_prep.graph import runner

    clock.end()
    clock.watch(compat, "prepare_process", OURS[0])
    clock.watch(current_platform, "check_and_update_config", OURS[2])
    clock.watch(worker.NPUModelRunner, "warm_up", OURS[3])
    clock.watch(runner, "capture_graphs", OURS[4])
    for method, name in WORKER.items():
        clock.watch(worker.NPUWorker, method, name)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", model, *FLAGS, *flags])
    clock.begin("config, scheduler, KV cache, the rest")
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    clock.end()
    clock.begin("stop")
    engine.engine_core.shutdown()
    clock.end()
    return clock.seconds


def main() -> None:
    """Measure in processes of their own, print medians and ratios."""
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / ".cache" / "tiny-qwen3"))
    parser.add_argument("--runs", type=int, default=3)
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
    runs = runs[1:]
    rows = {
        name: (median(run[name] for run in runs), median(run[name] / run[UNIT] for run in runs))
        for name in runs[0]
    }
    if args.json:
        print(json.dumps(rows))
        return
    width = max(map(len, rows))
    print(f"{'':{width}}      s  of `{UNIT}`")
    for name, (seconds, ratio) in rows.items():
        print(f"{name:{width}}  {seconds:5.2f}  {ratio:6.2f}")
    total = [sum(each.values()) for each in runs]
    print(f"{'together':{width}}  {median(total):5.2f}")


if __name__ == "__main__":
    main()
