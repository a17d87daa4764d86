"""Everything that the doctor asks of a host, so that tests can replace the host."""

import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from vllm_npu_prep.compat.releases import SUPPORTED_VLLM

DISTRIBUTION = "vllm_npu_prep"
PACKAGES = ("torch", "torch_npu", "vllm", "numba", "torchvision")
"""The distributions whose versions matter."""

PLUGIN_GROUP = "vllm.platform_plugins"
LARGEST_TEXT = 1 << 20
"""The most bytes read from a file or from a command's output."""


@dataclass(frozen=True)
class Ran:
    """The result of a command."""

    code: int | None  # exit code, negative for a signal; None if it had to be killed
    out: str  # what it printed, also when it was killed
    err: str = ""


@dataclass(frozen=True)
class Host:
    """A host, or a made-up one."""

    root: Path  # folder that stands for ``/``
    environment: Mapping[str, str]
    versions: Mapping[str, str]  # of the installed distributions among `PACKAGES`
    required: Mapping[str, tuple[str, ...]]  # versions that this plugin was tested with
    platform_plugins: tuple[str, ...]  # names under which platform plugins of vLLM are installed
    # Runs a command with a time limit in seconds; raises OSError if it can't be started
    run: Callable[[list[str], float], Ran]
    python: tuple[int, int] = field(default=sys.version_info[:2])  # version of the interpreter
    machine: str = field(default_factory=platform.machine)  # architecture, as in CANN's folders

    @classmethod
    def here(cls) -> "Host":
        return cls(
            Path("/"),
            os.environ,
            installed_versions(),
            required_versions(),
            tuple(sorted({entry.name for entry in metadata.entry_points(group=PLUGIN_GROUP)})),
            run_command,
        )

    def path(self, path: str) -> Path:
        """Return the real location of an absolute path of the host, below `root`."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """Return the text of a file, at most `LARGEST_TEXT` bytes of it.

        Raises
        ------
        OSError
            If it can't be read.
        """
        # Non-blocking: the path may be a pipe to which nobody writes.
        descriptor = os.open(self.path(path), os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            return file.read(LARGEST_TEXT).decode(errors="replace")

    def exists(self, path: str) -> bool:
        """Tell whether the path exists; False if we may not look."""
        try:
            return self.path(path).exists()
        except OSError:
            return False

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; empty if we may not look."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    @property
    def asked(self) -> str:
        """The device that ``NPU_PREP_DEVICE`` asks for: ``auto`` if it is unset or empty."""
        return self.environment.get("NPU_PREP_DEVICE", "auto").strip().lower() or "auto"

    @property
    def needs_npu(self) -> bool:
        """Whether an NPU has to be there, as `vllm_npu_prep.device.choose_device` decides."""
        return self.asked == "npu" or (self.asked != "cpu" and "torch_npu" in self.versions)

    @property
    def in_container(self) -> bool:
        """Whether this looks like a container: missing parts are then passed in, not installed."""
        marks = ("/.dockerenv", "/run/.containerenv")
        return any(map(self.exists, marks)) or "KUBERNETES_SERVICE_HOST" in self.environment


def installed_versions() -> dict[str, str]:
    """Return the versions of what is installed among `PACKAGES`, without importing any of it."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def required_versions() -> dict[str, tuple[str, ...]]:
    """Return the versions that this plugin pins in its own metadata, with those of its extras.

    It supports several releases of vLLM, of which its metadata has a range.
    """
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # on PYTHONPATH only
        return {}
    pinned = (re.match(r"([\w.-]+)==([\w.]+)", text) for text in requirements)
    pins = {match[1].replace("-", "_"): (match[2],) for match in pinned if match}
    return {**pins, "vllm": SUPPORTED_VLLM}


def run_command(command: list[str], seconds: float) -> Ran:
    """Run a command, and kill it and its children when its time is up.

    We don't wait for a killed command: a process that hangs in a broken driver never ends.

    Raises
    ------
    OSError
        If it can't be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(LARGEST_TEXT).decode(errors="replace"))
    return Ran(code, *texts)


def set_env_of(cann: str | None) -> str:
    return f"{(cann or '/usr/local/Ascend/cann').removesuffix('/latest')}/set_env.sh"


def gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
