"""This plugin beside vllm-ascend, unmodified, on the same emulated card: counts and host time.

    make peer                                    # once: vllm-ascend, in .cache/vllm-ascend
    python benchmarks/peer.py [--engine V1-eager] [--case "32 decodes"] [--rounds 3]

Each program is a process of its own (`peer_engine.py`), since they need other versions of vLLM and
torch_npu. Both serve the same tiny model and the same requests, each with its own defaults, and are
measured in turns, with one thread. Copies, launches and waits of an engine's step are counted.
Host time is the engine's thread without what it spent in the emulator; its streams run between
steps. So no launch costs time here, neither one of torch_npu nor one of Triton, and the column
"with launches" charges `LAUNCH_US` for each, on both sides.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
WORKER = ROOT / "benchmarks" / "peer_engine.py"
ENVIRONMENTS = {"vllm-ascend": ROOT / ".cache" / "vllm-ascend", "this plugin": Path(sys.prefix)}
LAUNCH_US = 8.68
"""Host time of a launch by Triton on a GB200's host (vllm-project/vllm#34838). What a launch costs
on a host with NPUs was not measured."""
EMULATOR = ("--quiet", "--hazards", "warn")
"""Hazards don't end a run; each row has their number."""
HEAD_SIZE = 64
SIZES: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 512, "head_dim": HEAD_SIZE},
    **{"num_hidden_layers": 2, "spread": 0.1, "embedding_scale": 20.0},
}
ENGINE: dict[str, Any] = {
    **{"dtype": "bfloat16", "seed": 0, "block_size": 128, "enable_prefix_caching": False},
    **{"max_model_len": 512, "max_num_seqs": 256, "max_num_batched_tokens": 1024},
    "kv_cache_memory_bytes": 512 << 20,
}
OPTIONS = {"vllm-ascend": {"enable_cpu_binding": False}, "this plugin": {}}
"""Options that only one program has. Without them, vllm-ascend would choose its processors."""
CAPTURED = [8, 32, 256]
SHORT = 4
LONGEST = 240


class Case(NamedTuple):
    """Requests of each step: decodes that stay, and prompts that come and go."""

    decodes: int
    prompts: int = 0
    prompt_len: int = 16

    def job(self) -> dict[str, Any]:
        """For the worker. Prompts repeat themselves, so that prompt lookup finds drafts."""
        rng = random.Random(0)

        def prompt(length: int) -> list[int]:
            words = [rng.randrange(5, 500) for _ in range(2)]
            return (words * length)[:length]

        steps = [[prompt(self.prompt_len) for _ in range(self.prompts)] for _ in range(4)]
        return {
            "decodes": [prompt(SHORT) for _ in range(self.decodes)],
            "prompts": steps if self.prompts else [],
            "longest": LONGEST,
        }


CASES = {
    "8 decodes": Case(8),
    "32 decodes": Case(32),
    "256 decodes": Case(256),
    "8 prompts of 16 tokens": Case(0, 8),
    "31 decodes and a prompt of 16 tokens": Case(31, 1),
}
DRAFTS = {"ngram": 3, "eagle": 3, "mtp": 1}
"""Methods, and how many drafts each request has."""
ENGINES = [
    "-".join(filter(None, (runner, mode, method)))
    for method in ("", *DRAFTS)
    for runner in ("V1", "V2")
    for mode in ("eager", "graphs")
]


def make_models(folder: Path, engines: list[str]) -> dict[str, dict[str, Any]]:
    """Arguments of each engine."""
    from tests.helpers.drafters import make_eagle_head
    from tests.helpers.engine import make_model
    from tests.helpers.mtp import make_mtp_model

    model = make_model(folder / "qwen3", "Qwen3", **SIZES)
    lookup = {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    extra: dict[str, dict[str, Any]] = {"": {}, "ngram": lookup, "mtp": {}}
    methods = {name.split("-")[2] for name in engines if name.count("-") == 2}
    if "eagle" in methods:
        head = make_eagle_head(folder / "eagle", model, "eagle", head_dim=HEAD_SIZE)
        extra["eagle"] = {"model": str(head)}
    if "mtp" in methods:
        make_mtp_model(folder / "mimo", "MiMo", **SIZES)
    arguments = {}
    for name in engines:
        _, mode, method = [*name.split("-"), ""][:3]
        engine = {**ENGINE, "model": str(folder / "mimo" if method == "mtp" else model)}
        number = DRAFTS.get(method, 0)
        if method:
            config = {"method": method, "num_speculative_tokens": number, **extra[method]}
            engine["speculative_config"] = config
        if mode == "eager":
            engine["enforce_eager"] = True
        else:
            sizes = [32 * (1 + number)] if number else CAPTURED
            engine["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        arguments[name] = engine
    return arguments


class RefusedError(Exception):
    """An engine ended before it had answered; the message is its last line."""


class Program:
    """A process with an engine of one of the two programs."""

    def __init__(self, side: str, name: str, engine: dict[str, Any], log: Path) -> None:
        inherited = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
        # vLLM would find the plugin in the root, and both programs are platforms
        paths = [ROOT / "emulator"] if side == "vllm-ascend" else [ROOT, ROOT / "emulator"]
        python = ENVIRONMENTS[side] / "bin" / "python"
        self.log = log
        self.process = subprocess.Popen(
            [python, "-m", "ascend_emulator", *EMULATOR, "--", "python", str(WORKER)],
            cwd=log.parent,
            env={
                **inherited,
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "HF_HUB_OFFLINE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_NO_USAGE_STATS": "1",
                "NPU_PREP_DEVICE": "npu",
                "OMP_NUM_THREADS": "1",
                "NUMBA_NUM_THREADS": "1",
                "VLLM_USE_V2_MODEL_RUNNER": str(int(name.startswith("V2"))),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        self._write({"engine": {**engine, "additional_config": OPTIONS[side]}})

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()  # the worker ends
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ask(self, case: dict[str, Any]) -> dict[str, Any]:
        self._write(case)
        return self.answer("STEPS")

    def answer(self, word: str) -> dict[str, Any]:
        """The next line that begins with a word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word + " "):
                return dict(json.loads(line.removeprefix(word)))
        self.process.wait()
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        errors = [line for line in lines if "Error: " in line]
        raise RefusedError((errors or lines or ["no output"])[-1])

    def _write(self, value: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why


def measure(
    name: str, engine: dict[str, Any], cases: dict[str, Case], rounds: int, folder: Path
) -> list[dict[str, Any]]:
    """Rows of one kind of engine; a program that refuses it has a row that says so."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        programs = {}
        for side in ENVIRONMENTS:
            log = folder / f"{side}, {name}.log"
            program = stack.enter_context(Program(side, name, engine, log))
            try:
                about = program.answer("READY")
            except RefusedError as error:
                rows.append({"engine": name, "program": side, "refused": str(error)})
                continue
            programs[side] = program
            rows.append({"engine": name, "program": side, **about})
        for case_name, case in cases.items():
            found: dict[str, list[dict[str, Any]]] = {side: [] for side in programs}
            counts, job = {}, case.job()
            try:
                for side, program in programs.items():
                    counts[side] = program.ask({**job, "timed": False, "warm": 5, "steps": 3})
                for _ in range(rounds):
                    for side, program in programs.items():
                        timed = {**job, "timed": True, "warm": 4, "steps": 8}
                        found[side].append(program.ask(timed))
            except RefusedError as error:
                rows.append({"engine": name, "case": case_name, "refused": f"{side}: {error}"})
                break
            rows += [row(name, case_name, side, counts[side], found[side]) for side in programs]
    return rows


def row(
    engine: str, case: str, side: str, counts: dict[str, Any], times: list[dict[str, Any]]
) -> dict[str, Any]:
    """One program's row: counts, and medians of the rounds, if it was timed."""
    result = {"engine": engine, "case": case, "program": side, "scheduled": counts["scheduled"]}
    for part in ("prepare", "runner", "step"):
        result[part] = {key: value for key, value in counts[part].items() if value}
        if not times:
            continue
        launched = counts[part]["launches"] + counts[part]["graph_launches"]
        host_us = median(each[part]["ns"] for each in times) / 1000
        result[part]["host_us"] = round(host_us, 1)
        result[part]["with_launches_us"] = round(host_us + LAUNCH_US * launched, 1)
    return result


COLUMNS: dict[str, Callable[[dict[str, Any]], int]] = {  # of a part of a step
    "copies": lambda c: c.get("h2d_copies", 0) + c.get("d2h_copies", 0) + c.get("d2d_copies", 0),
    "of pageable memory": lambda c: c.get("staged_copies", 0),
    "bytes": lambda c: c.get("h2d_bytes", 0) + c.get("d2h_bytes", 0) + c.get("d2d_bytes", 0),
    "launches": lambda c: c.get("launches", 0) + c.get("graph_launches", 0),
    "copies of strided tensors": lambda c: c.get("hidden_copies", 0),
    "waits": lambda c: c.get("syncs", 0),
    "host, µs": lambda c: round(c.get("host_us", 0)),
    "with launches, µs": lambda c: round(c.get("with_launches_us", 0)),
}
TABLES = {"preparation": "prepare", "step": "step"}


def markdown(rows: list[dict[str, Any]]) -> str:
    """Two tables: of the preparation, and of the engine's whole step."""
    lines = []
    for title, part in TABLES.items():
        lines += [f"| {title} | program | {' | '.join(COLUMNS)} |", "| --- " * 10 + "|"]
        for each in rows:
            if "case" in each and "refused" not in each:
                cells = [f"{of(each[part]):,}" for of in COLUMNS.values()]
                first = f"{each['engine'].replace('-', ', ')}: {each['case']}"
                lines.append(f"| {first} | {each['program']} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or one object a line as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--engine",
        action="append",
        choices=ENGINES,
        help="runner, mode, and maybe how it drafts; may be repeated (default: all)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="how often each program is timed; 0 counts alone (default: %(default)s)",
    )
    parser.add_argument(
        "--case",
        action="append",
        choices=CASES,
        help="of engines without drafts; may be repeated (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print one object a line")
    args = parser.parse_args()
    if not (ENVIRONMENTS["vllm-ascend"] / ".installed").exists():
        sys.exit("vllm-ascend is not there: run make peer first")
    engines = args.engine or ENGINES
    cases = {name: CASES[name] for name in args.case or CASES}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, engine in make_models(Path(folder), engines).items():
            number = DRAFTS.get([*name.split("-"), ""][2], 0)
            drafted = {f"32 decodes with {number} draft{'s' * (number > 1)} each": Case(32)}
            found = measure(name, engine, drafted if number else cases, args.rounds, Path(folder))
            rows += found
            for each in found:
                if args.json:
                    print(json.dumps(each), flush=True)
                elif "refused" in each:
                    print(f"{each['engine']}: {each.get('program', '')} {each['refused']}")
                elif "versions" in each:
                    versions = ", ".join(f"{k} {v}" for k, v in each["versions"].items())
                    print(f"{name}, {each['program']}: {versions}; graphs {each['graphs']}")
    if not args.json:
        print(markdown(rows))


if __name__ == "__main__":
    main()
