"""The Dockerfile in parts, and the commands of the manifests."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from dockerfile_parse import DockerfileParser

from tests.helpers.waiting import LIMIT

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
COMPOSE = sorted((DEPLOY / "compose").glob("*.yaml"))
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
GIVEN = {
    **{"MODELS": "/data/models", "MODEL": "Qwen3-8B", "HEAD": "10.0.0.1", "IP": "10.0.0.1"},
    "INTERFACE": "eth0",
}


class Stage(NamedTuple):
    """A stage of the Dockerfile: its base and its instructions, as (name, value)."""

    base: str
    instructions: list[tuple[str, str]]

    def all(self, *names: str) -> list[str]:
        return [value for name, value in self.instructions if name in names]


def read_dockerfile() -> dict[str, Stage]:
    """The stages by name."""
    text = (ROOT / "Dockerfile").read_bytes()
    stages: dict[str, Stage] = {}
    stage = None
    for part in DockerfileParser(fileobj=io.BytesIO(text)).structure:
        name, value = part["instruction"], part["value"]
        if name == "COMMENT":
            continue
        if name == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", value).groups()
            stage = stages[name] = Stage(base, [])
        elif stage is not None:
            stage.instructions.append((name, value))
    return stages


def expanded(text: str, variables: dict[str, str]) -> str:
    """`text` with ``$NAME`` and ``${NAME}`` replaced, by nothing where unknown."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], ""), text)


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def ran(*command: str | Path, **how: Any) -> subprocess.CompletedProcess:
    how = {"capture_output": True, "text": True, "timeout": LIMIT, **how}
    return subprocess.run([*map(str, command)], **how)


def tool(name: str) -> str:
    """A program of this environment, or of the host."""
    found = Path(sys.executable).with_name(name)
    return str(found) if found.exists() else str(shutil.which(name))


def pods() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, replicas and specification of every pod that the manifests make."""
    for path in KUBERNETES:
        for document in documents(path):
            spec = document["spec"]
            if "template" in spec:
                yield f"{path.name} {document['metadata']['name']}", spec["replicas"], spec


PODS = {name: (replicas, spec) for name, replicas, spec in pods()}


def serve_flags(command: list[str]) -> list[str] | None:
    """Arguments of the ``vllm serve`` in a command; None if there is none."""
    if command[-2:-1] == ["-c"]:
        command = shlex.split(command[-1])
    if command[:1] and command[0].endswith("entrypoint.sh"):
        command = command[1:]
    for at in range(len(command)):
        if command[at : at + 2] == ["vllm", "serve"]:
            return command[at + 2 :]
    return None


def entry_point() -> list[str]:
    """What the images run before the arguments that they are given."""
    return json.loads(read_dockerfile()["ascend"].all("ENTRYPOINT")[-1])


def compose(path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """What ``docker compose config`` says of a file."""
    command = (tool("docker-compose"), "-f", path, "--profile", "*", "config", *arguments)
    own = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return ran(*command, env=own | environment)


@cache
def services() -> dict[str, dict[str, Any]]:
    """Name and configuration of each service, as compose itself reads it."""
    found = {}
    for path in COMPOSE:
        shown = compose(path, "--format", "json", **GIVEN)
        assert shown.returncode == 0, shown.stderr
        for name, service in json.loads(shown.stdout)["services"].items():
            found[f"{path.name} {name}"] = service
    return found


def command_of(part: dict[str, Any]) -> list[str]:
    """Whole command of a compose service, or of a container of a pod."""
    if "args" in part:
        return [*(part.get("command") or entry_point()), *part["args"]]
    return [*(part.get("entrypoint") or entry_point()), *(part.get("command") or [])]


def files_of(folder: Path) -> list[Path]:
    """Files of a package, relative to it; without byte code."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return [path.relative_to(folder) for path in paths]
