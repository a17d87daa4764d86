#!/usr/bin/env python3
"""Build a target of the Dockerfile in plain folders with chroot, and try the result.

For machines without a container engine: it takes the Dockerfile's own instructions, in order, so
what it shows holds for these. What it doesn't show: layers, caching, limits, and base images other
than the one it is given. Needs root and a base, which debootstrap makes::

    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv \\
        bookworm base
    scripts/image_dry_run.py --target cpu --base base --work work --serve .cache/tiny-qwen3
"""

import argparse
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[1]
SECONDS_TO_START, SECONDS_TO_END = 900, 120
QUESTION = (
    "import json, sys, urllib.request as r;"
    "body = {'model': sys.argv[1], 'max_tokens': 8, 'prompt': 'What is a block?'};"
    "q = r.Request('http://127.0.0.1:8000/v1/completions', json.dumps(body).encode(),"
    " {'Content-Type': 'application/json'});"
    "print(json.load(r.urlopen(q, timeout=60))['choices'][0]['text'])"
)


class Stage:
    """A stage's folder, and what its instructions have set so far.

    Attributes
    ----------
    root
        Folder that becomes ``/``.
    environment
        What ``ENV`` sets, and so far what ``ARG`` does; `arguments` names the latter.
    """

    def __init__(self, root: Path):
        self.root = root
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.arguments: set[str] = set()
        self.folder, self.user = "/", "root"
        self.entry, self.health = [], []

    def expand(self, text: str) -> str:
        """`text` with variables replaced."""
        return re.sub(r"\$\{?(\w+)\}?", lambda match: self.environment.get(match[1], ""), text)

    def inside(self, path: str) -> Path:
        """Where a path of the image lies."""
        return self.root / os.path.normpath(os.path.join(self.folder, path)).lstrip("/")

    def enter(self, command: list[str], mounts: list[tuple[Path, str]] = ()) -> list[str]:
        """Command line that runs `command` in the image, with mounts that end with it."""
        lines = ["set -e"]
        for source, target in [*mounts, (Path("/proc"), "/proc"), (Path("/dev"), "/dev")]:
            inside = self.root / target.lstrip("/")
            if source.is_dir():
                inside.mkdir(parents=True, exist_ok=True)
            elif not inside.exists():
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.touch()
            lines.append(f"mount --rbind {shlex.quote(str(source))} {shlex.quote(str(inside))}")
        words = [f"{name}={value}" for name, value in self.environment.items()]
        step = shlex.join(["env", "-i", f"HOME={self.home()}", *words, *command])
        step = f"cd {shlex.quote(self.folder)} && exec {step}"
        who = [] if self.user == "root" else [f"--userspec={self.user}"]
        root = ["chroot", *who, str(self.root), "/bin/bash", "-c", step]
        lines.append("exec " + shlex.join(root))
        return ["unshare", "--mount", "/bin/bash", "-c", "\n".join(lines)]

    def home(self) -> str:
        """Home of the user."""
        number = self.user.partition(":")[0].replace("root", "0")
        lines = (self.root / "etc/passwd").read_text().splitlines()
        return next(line.split(":")[5] for line in lines if line.split(":")[2] == number)


class Build:
    """Stages of one Dockerfile, made when they are asked for."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.made = args, {}
        self.given = dict(item.split("=", 1) for item in args.build_arg)
        text = io.BytesIO((ROOT / "Dockerfile").read_bytes())
        parts = list(DockerfileParser(fileobj=text).structure)
        self.stages: dict[str, list[tuple[str, str]]] = {}
        self.globals: dict[str, str] = {}
        current = None
        for part in parts:
            name, value = part["instruction"], part["value"]
            if name == "FROM":
                current = self.stages.setdefault(value.split()[-1], [])
            elif name != "COMMENT" and current is not None:
                current.append((name, value))
            elif name == "ARG":
                key, _, default = value.partition("=")
                self.globals[key] = self.given.get(key, default)
        self.context = args.work / "context"
        self.make_context()

    def make_context(self) -> None:
        """Copy what .dockerignore lets through."""
        shutil.rmtree(self.context, ignore_errors=True)
        for line in (ROOT / ".dockerignore").read_text().splitlines():
            if line.startswith("!"):
                source, target = ROOT / line[1:], self.context / line[1:]
                target.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(source, target, ignore=ignored)
                else:
                    shutil.copy2(source, target)

    def stage(self, name: str) -> Stage:
        """A stage, made now if it wasn't."""
        if name not in self.made:
            print(f"== {name}", flush=True)
            root = self.args.work / name
            if root.exists():
                shutil.rmtree(root)
            subprocess.run(["cp", "-a", self.args.base, root], check=True)
            stage = self.made[name] = Stage(root)
            for instruction, value in self.stages[name]:
                getattr(self, instruction.lower())(stage, value)
        return self.made[name]

    def arg(self, stage: Stage, value: str) -> None:
        """ARG: of the command line, or the default of the stage or of the top."""
        key, _, default = value.partition("=")
        stage.environment[key] = self.given.get(key, default or self.globals.get(key, ""))

    def env(self, stage: Stage, value: str) -> None:
        """ENV."""
        for word in shlex.split(value):
            key, _, text = word.partition("=")
            stage.environment[key] = stage.expand(text)

    def workdir(self, stage: Stage, value: str) -> None:
        """WORKDIR."""
        stage.folder = value
        stage.inside(value).mkdir(parents=True, exist_ok=True)

    def user(self, stage: Stage, value: str) -> None:
        """USER."""
        stage.user = stage.expand(value)

    def run(self, stage: Stage, value: str) -> None:
        """RUN, in a shell, with its mounts."""
        mounts = [(path, str(path)) for path in self.args.bind]
        while match := re.match(r"\s*--mount=(\S+)\s+", value):
            value = value[match.end() :]
            words = match[1].split(",")
            options = dict(word.partition("=")[::2] for word in words)
            if options["type"] == "bind":
                mounts.append((self.context / options.get("source", ""), options["target"]))
            elif options["type"] == "cache":
                cache = self.args.work / "cache"
                cache.mkdir(exist_ok=True)
                mounts.append((cache, options["target"]))
            elif self.args.secret:
                mounts.append((self.args.secret, options["target"]))
        print(f"-- RUN {value}", flush=True)
        start = time.monotonic()
        subprocess.run(stage.enter(["/bin/sh", "-c", value], mounts), check=True)
        print(f"   {time.monotonic() - start:.0f} s", flush=True)

    def copy(self, stage: Stage, value: str) -> None:
        """COPY, from the context or from another stage."""
        *sources, target = value.split()
        folder = self.context
        if sources[0].startswith("--from="):
            folder = self.stage(sources.pop(0).removeprefix("--from=")).root
        inside = stage.inside(target)
        if len(sources) > 1 or target.endswith("/"):
            inside.mkdir(parents=True, exist_ok=True)
        inside.parent.mkdir(parents=True, exist_ok=True)
        for source in sources:
            path = folder / source.lstrip("/")
            what = f"{path}/." if path.is_dir() else str(path)
            subprocess.run(["cp", "-a", "--no-preserve=ownership", what, inside], check=True)

    def entrypoint(self, stage: Stage, value: str) -> None:
        """ENTRYPOINT."""
        stage.entry = json.loads(value)

    def healthcheck(self, stage: Stage, value: str) -> None:
        """HEALTHCHECK."""
        stage.health = json.loads(value[value.index("[") :])

    def expose(self, stage: Stage, value: str) -> None:
        """EXPOSE: nothing is closed here."""

    cmd = expose


def serve(stage: Stage, model: Path) -> None:
    """Start the image with a model, ask it, and stop it."""
    # Whoever made it, the image's user has to read it: libraries write weights with mode 0600.
    stage.inside("/models").mkdir(exist_ok=True)
    subprocess.run(["cp", "-rT", model, stage.inside("/models/model")], check=True)
    subprocess.run(["chmod", "-R", "a+rX", stage.inside("/models")], check=True)
    flags = ["/models/model", "--dtype", "float32", "--max-model-len", "512"]
    flags += ["--kv-cache-memory-bytes", "67108864", "--shutdown-timeout", "30"]
    stage.environment |= {"OMP_NUM_THREADS": "1"}
    print(f"== {shlex.join([*stage.entry, *flags])}", flush=True)
    server = subprocess.Popen(stage.enter([*stage.entry, *flags]))
    start = time.monotonic()
    check = stage.enter(stage.health)
    try:
        while subprocess.run(check, capture_output=True).returncode:
            if server.poll() is not None:
                raise SystemExit(f"the server ended with {server.returncode}")
            if time.monotonic() - start > SECONDS_TO_START:
                raise SystemExit(f"not healthy after {SECONDS_TO_START} s")
            time.sleep(1)
        print(f"== healthy after {time.monotonic() - start:.0f} s", flush=True)
        ask = ["/opt/npu_prep/bin/python", "-c", QUESTION, "/models/model"]
        subprocess.run(stage.enter(ask), check=True)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            code = server.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            server.kill()
            raise
    print(f"== ended with {code} on SIGTERM", flush=True)
    if code:
        raise SystemExit(1)


def look(stage: Stage) -> None:
    """What the finished image must not have, and whose its files are."""
    tools = "gcc g++ cc c++ clang make cmake ninja ld git"
    script = f"for t in {tools}; do command -v $t; done; true"
    found = subprocess.run(stage.enter(["bash", "-c", script]), check=True, capture_output=True)
    if found.stdout:
        raise SystemExit(f"build tools in the image: {found.stdout.decode()}")
    cache = "/opt/npu_prep/cache"
    script = f"""
        id
        [ "$(id -u)" != 0 ]
        [ -w {cache}/numba ]
        [ ! -w /opt/npu_prep/bin ]
        find {cache} -name '*.nbi' | grep .
        find {cache}/vllm -type f | grep .
    """
    subprocess.run(stage.enter(["bash", "-ec", script]), check=True)


def main() -> None:
    """Build, look, serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="stage of the Dockerfile to build")
    parser.add_argument(
        "--base", required=True, type=Path, help="file system that stands for the base image"
    )
    parser.add_argument("--work", required=True, type=Path, help="folder for the stages")
    parser.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="as of docker build; may be repeated",
    )
    parser.add_argument("--secret", type=Path, help="pip.conf for the build")
    parser.add_argument(
        "--bind",
        type=Path,
        action="append",
        default=[],
        help="path of this host to add; may be repeated",
    )
    parser.add_argument(
        "--serve", type=Path, metavar="MODEL", help="serve this model with the result"
    )
    args = parser.parse_args()
    if os.geteuid():
        parser.error("chroot needs root")
    args.work.mkdir(parents=True, exist_ok=True)
    args.work = args.work.resolve()
    stage = Build(args).stage(args.target)
    look(stage)
    if args.serve:
        serve(stage, args.serve)


if __name__ == "__main__":
    sys.exit(main())
