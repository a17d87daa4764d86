"""Requests a second and latency of a server whose model returns at once, beside vLLM's.

    python benchmarks/serving.py [--json] [--markdown] [--rounds 3] [--warm-up 1] [--server ours]
                                 [--concurrency 256] [--prompts 512] [--request-rate 80]

Two servers (``vllm serve``) wait for requests, and ``vllm bench serve`` asks them in turns:

========  ==========================================================================================
server    what runs in its engine process
========  ==========================================================================================
ours      this plugin's scheduler and runner, as they are by default
vllm      vLLM's own `AsyncScheduler` and V1 runner, with a metadata builder that does nothing and
          this plugin's torch replacement of the Triton kernel for slots
========  ==========================================================================================

Everything else is the same vLLM in both: API server, tokenizer, engine loop, client. vLLM can't
run here without a platform, so the second server loads this plugin, too, and takes nothing
else from it in a step. Model and sampler return at once: what is measured is all of a server but
the device.

Columns: requests a second, medians of the time between tokens (``itl``) and to the first token
(``ttft``), and microseconds of the engine process's processor time for each token. The last one
hardly depends on what else the machine does. API server and client take more of a machine with few
cores than the engine does. ``--markdown`` prints the rows of the table in
docs/guides/performance.md.

The client sends the next request when one ends (a closed loop): ``--concurrency`` of them begin
together, and as they are equally long, end together. With ``--request-rate`` it sends them at
random moments, so many a second (Poisson), however many are still running (an open loop).
"""

import argparse
import contextlib
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
SIDE_VARIABLE = "SERVING_SIDE"
SIDES = ("ours", "vllm")
TITLES = {"ours": "this plugin", "vllm": "vLLM's scheduler and runner"}
SHOWN = {"requests_per_s": 1, "itl_ms": 1, "p99_itl_ms": 0, "ttft_ms": 0, "engine_us_per_token": 1}
"""Columns of the guide's table, and their decimals."""

VOCAB = 512
START_LIMIT = 600.0
"""Seconds in which a server has to answer."""


def instant_worker() -> type:
    """The class of both servers' worker, in their engine process."""
    import torch
    from engine_step import ConstantSampler
    from host_step import StubModel, twin_of

    from vllm_npu_prep.worker import NPUWorker

    class InstantWorker(NPUWorker):
        """A worker whose model and sampler return at once, with our runner or vLLM's."""

        @torch.inference_mode()
        def compile_or_warm_up_model(self) -> Any:
            """Replace the model, the sampler and, on vLLM's side, the runner."""
            made = super().compile_or_warm_up_model()
            runner: Any = self.model_runner
            self.tasks = runner.get_supported_tasks()
            if os.environ[SIDE_VARIABLE] == "vllm":
                runner = twin_of(runner)
            runner.model = StubModel(runner.max_num_tokens)
            runner.sampler = ConstantSampler()
            self.model_runner = runner
            # For as long as the process lives: vLLM's asynchronous outputs make streams
            self.streams = self.prep_device.host_streams()
            self.streams.__enter__()
            return made

        def get_supported_tasks(self) -> Any:
            """What the replaced model can do."""
            return self.tasks

    return InstantWorker


def __getattr__(name: str) -> Any:
    """``serving.InstantWorker``, made where it is asked for: the benchmark needs no vLLM."""
    if name == "InstantWorker":
        return instant_worker()
    raise AttributeError(name)


class Server:
    """``vllm serve`` on a free port of this machine.

    Parameters
    ----------
    side
        Its name among the servers of a benchmark.
    command
        What starts it, with its model.
    flags
        Further flags of ``vllm serve``.
    environment
        Its environment variables.
    folder
        Where it logs.
    """

    def __init__(
        self,
        side: str,
        command: Sequence[str],
        flags: Sequence[str],
        environment: dict[str, str],
        folder: Path,
    ) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        command = [
            *command,
            *("--port", str(self.port), "--host", "127.0.0.1", "--dtype", "float32"),
            *("--enforce-eager", "--max-model-len", "2048", "--disable-uvicorn-access-log"),
            *flags,
        ]
        self.side, self.log = side, folder / f"{side}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        """Until it answers.

        Raises
        ------
        SystemExit
            If it ended, or did not answer in time.
        """
        end = time.monotonic() + START_LIMIT
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10)
                return
            time.sleep(1)
        sys.exit(f"the server of {self.side} did not start:\n{self.log.read_text()[-3000:]}")

    def engine_seconds(self) -> float:
        """Processor time of its engine process, and of its ranks, until now.

        Raises
        ------
        SystemExit
            If there is none any more.
        """
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()):
                times = [each.cpu_times() for each in (child, *child.children(recursive=True))]
                return sum(each.user + each.system for each in times)
        told = self.log.read_text()
        first = told.find("Traceback")  # the last ones are the API server's
        sys.exit(f"the engine of {self.side} ended:\n{told[max(first, 0) :][:3000]}")

    def stop(self) -> None:
        """End it and wait until it has."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def vllm_serve(model: Path) -> list[str]:
    """The command of this environment's vLLM that serves a model."""
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]


def flags_of(side: str, concurrency: int) -> list[str]:
    """Flags of a server with `concurrency` requests in a step, at most."""
    options = {"mask": "compressed"}  # as NPUs get it
    if side == "vllm":
        options["scheduler"] = "upstream"
    return [
        *("--load-format", "dummy", "--worker-cls", "serving.InstantWorker"),
        *("--max-num-seqs", str(concurrency), "--max-num-batched-tokens", "8192"),
        *("--kv-cache-memory-bytes", str(256 << 20), "--no-enable-prefix-caching"),
        *("--additional-config", json.dumps({"npu_prep": options})),
    ]


def environment(side: str) -> dict[str, str]:
    """Variables of a server, or of the client."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "NPU_PREP_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # beside vLLM's V1 runner
        SIDE_VARIABLE: side,
    }


def bench(server: Server, model: Path, folder: Path, *flags: str) -> dict[str, Any]:
    """Run ``vllm bench serve`` against a server, and return all that it tells.

    Raises
    ------
    SystemExit
        If it failed.
    """
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--base-url", f"http://127.0.0.1:{server.port}", "--model", str(model)),
        *("--seed", "0", "--disable-tqdm", "--save-result", "--result-filename", str(result)),
        *flags,
    ]
    done = subprocess.run(command, env=environment("client"), capture_output=True, text=True)
    if done.returncode or not result.exists():
        sys.exit(f"the client failed:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    return json.loads(result.read_text())


def ask(server: Server, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Run the client once against a server.

    Raises
    ------
    SystemExit
        If it failed, or a request did.
    """
    rate = ["--request-rate", str(args.request_rate)] if args.request_rate else []
    at_once = [] if rate else ["--max-concurrency", str(args.concurrency)]
    before = server.engine_seconds()
    told = bench(
        *(server, model, folder, "--backend", "vllm", "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)),
        *("--num-prompts", str(args.prompts), *at_once, *rate),
    )
    seconds = server.engine_seconds() - before
    expected = args.prompts * args.output_len
    if told["completed"] != args.prompts or told["total_output_tokens"] != expected:
        sys.exit(
            f"{server.side}: {told['completed']} requests of {args.prompts} were served, with "
            f"{told['total_output_tokens']} tokens of {expected}; no numbers"
        )
    return {
        "requests_per_s": told["request_throughput"],
        "itl_ms": told["median_itl_ms"],
        "p99_itl_ms": told["p99_itl_ms"],
        "ttft_ms": told["median_ttft_ms"],
        "engine_us_per_token": 1e6 * seconds / expected,
    }


@contextlib.contextmanager
def servers(sides: dict[str, Callable[[], Server]]) -> Iterator[list[Server]]:
    """The servers of these sides, which start together."""
    print(f"starting servers: {', '.join(sides)} ...", file=sys.stderr, flush=True)
    with contextlib.ExitStack() as stack:
        made = []
        for start in sides.values():
            made.append(start())
            stack.callback(made[-1].stop)
        for server in made:
            server.wait()
        yield made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--markdown", action="store_true", help="rows of the guide's table")
    parser.add_argument("--rounds", type=int, default=3, help="runs of the client for each server")
    parser.add_argument("--warm-up", type=int, default=1, help="runs before these, not counted")
    parser.add_argument(
        "--server", action="append", choices=SIDES, help="one server alone; may be repeated"
    )
    parser.add_argument("--concurrency", type=int, default=256, help="requests at once")
    parser.add_argument(
        "--request-rate", type=float, metavar="R", help="send R requests a second, as they come"
    )
    parser.add_argument("--prompts", type=int, default=512, help="requests of each run")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.helpers.engine import make_model, save_tokenizer

    sides = args.server or SIDES
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(
            folder / "model", vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=1 << 16
        )
        save_tokenizer(model, VOCAB)
        starts = {
            side: functools.partial(
                Server,
                side,
                vllm_serve(model),
                flags_of(side, args.concurrency),
                environment(side),
                folder,
            )
            for side in sides
        }
        with servers(starts) as made:
            for turn in range(1 - args.warm_up, 1 + args.rounds):
                for server in sorted(made, key=lambda each: each.side, reverse=bool(turn % 2)):
                    print(f"run {turn} of {args.rounds}: {server.side} ...", file=sys.stderr)
                    found = ask(server, model, folder, args)
                    if turn > 0:
                        runs[server.side].append(found)
    rows: list[dict[str, Any]] = [
        {"server": side}
        | {name: round(statistics.median(run[name] for run in of), 2) for name in of[0]}
        for side, of in runs.items()
    ]
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return
    if args.markdown:
        for row in rows:
            numbers = [f"{row[name]:,.{digits}f}" for name, digits in SHOWN.items()]
            print(f"| {' | '.join([TITLES[row['server']], *numbers])} |")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
