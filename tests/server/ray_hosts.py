"""Two hosts in network namespaces of this one, joined by a cable, with a Ray node on each."""

import ctypes
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.waiting import LIMIT
from tests.server.process import ROOT, Server

ADDRESSES = ("198.18.0.1", "198.18.0.2")  # of a range that is nobody's
PORT = 6379
RAY = Path(sys.executable).with_name("ray")
CLONE_NEWNET = 0x40000000


def why_no_hosts() -> str | None:
    """What this machine lacks to make two hosts of one; None if nothing."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces take root, and ip of iproute2"
    ran = _ip("netns", "add", f"npu-prep-try-{os.getpid()}", check=False)
    if ran.returncode == 0:
        _ip("netns", "del", f"npu-prep-try-{os.getpid()}")
    return f"no network namespaces: {ran.stderr.strip()}" if ran.returncode else None


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    ran = subprocess.run(["ip", *words], capture_output=True, text=True)
    if check and ran.returncode:
        raise OSError(f"ip {' '.join(words)}: {ran.stderr}")
    return ran


class Host:
    """A network namespace, and what runs in it."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address, self.folder = name, address, folder
        self.ray: subprocess.Popen | None = None
        _ip("netns", "add", name)

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self.name, "link", "set", "eth0", "down")

    def command(self, *words: str | Path) -> list[str]:
        """What runs a command on this host."""
        return ["ip", "netns", "exec", self.name, *map(str, words)]

    def environment(self, **more: str) -> dict[str, str]:
        """What is set on this host."""
        own = {"VLLM_HOST_IP": self.address, "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT)}
        return {**os.environ, **own, **more}

    def start_ray(self, *flags: str, **environment: str) -> subprocess.Popen:
        """``ray start`` with an NPU to offer; it ends when the node is up."""
        flags += (f"--node-ip-address={self.address}", '--resources={"NPU": 1}', "--num-cpus=1")
        with (self.folder / "ray.log").open("wb") as log:
            self.ray = subprocess.Popen(
                self.command(
                    *(RAY, "start", *flags, f"--temp-dir={self.folder}", "--disable-usage-stats")
                ),
                env=self.environment(**environment),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self.ray

    def processes(self) -> list[psutil.Process]:
        """All that run here."""
        found = []
        for pid in _ip("netns", "pids", self.name).stdout.split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def workers(self) -> list[psutil.Process]:
        """Ranks of an engine that run here."""
        return [each for each in self.processes() if "RayWorkerProc" in _title(each)]

    def kill(self) -> None:
        """End whatever runs here."""
        for each in self.processes():
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def remove(self) -> None:
        """End whatever runs here, and the namespace."""
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            self.kill()
            psutil.wait_procs(left, timeout=1)
        if self.ray is not None:
            self.ray.wait(LIMIT)
        _ip("netns", "del", self.name)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def two_hosts(**environment: str) -> Iterator[tuple[Host, Host]]:
    """The head of a Ray cluster with these settings, and a host that is about to join it."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # names of sockets are short
        stack.callback(shutil.rmtree, folder)
        hosts = []
        for index, address in enumerate(ADDRESSES):
            own = folder / str(index)
            own.mkdir()
            hosts.append(Host(f"npu-prep-{os.getpid()}-{index}", address, own))
            stack.callback(hosts[-1].remove)
        head, other = hosts
        ends = ("eth0", "netns", head.name, "type", "veth", "peer", "name", "eth0")
        _ip("link", "add", *ends, "netns", other.name)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")
        flags = ("--head", f"--port={PORT}", "--include-dashboard=false")
        if head.start_ray(*flags, **environment).wait(LIMIT):
            raise OSError((folder / "0" / "ray.log").read_text())
        other.start_ray(f"--address={head.address}:{PORT}", **environment)
        yield head, other


class ServerOnHost(Server):
    """`vllm serve` on a host whose Ray node it uses."""

    def __init__(self, host: Host, *arguments: Any, **environment: str) -> None:
        self.host, self.prefix = host, tuple(host.command())
        own = host.environment(RAY_ADDRESS=f"{host.address}:{PORT}", **environment)
        super().__init__(*arguments, "--distributed-executor-backend", "ray", **own)

    def connect(self) -> http.client.HTTPConnection:
        """A connection within that host's network."""
        connection = super().connect()
        with _network_of(self.host):
            connection.connect()
        return connection


@contextmanager
def _network_of(host: Host) -> Iterator[None]:
    """Let this thread make sockets in a host's network; a socket stays where it was made."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        Path("/proc/thread-self/ns/net").open() as here,
        Path(f"/run/netns/{host.name}").open() as there,
    ):
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            libc.setns(here.fileno(), CLONE_NEWNET)
