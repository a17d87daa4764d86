"""Checks the driver, device nodes, chips, CANN and memory of a host."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_npu_prep.attention.fused_releases import OLDEST, release_of
from vllm_npu_prep.driver import QUEUES, TASK_UPDATES, driver_key, is_older
from vllm_npu_prep.inspect.doctor.finding import Finding, bad_if, failure, ok, warning
from vllm_npu_prep.inspect.doctor.host import Host, gib

NPU_SMI_SECONDS = 20.0
NOT_NEEDED = "none; the CPU fallback needs none"

DRIVER_VERSION = "/usr/local/Ascend/driver/version.info"
CONTROL_NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
MOUNTS = (
    "/usr/local/dcmi",
    "/usr/local/Ascend/driver/lib64",
    "/etc/ascend_install.info",
)
"""Paths that a container gets from its host, besides nodes, ``npu-smi`` and driver version."""

CANN_FOLDERS = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")
CANN_IN_TABLE = (9, 1)
"""The newest CANN in torch_npu's published table, where it stands for torch_npu 2.12.0."""

NZ_CHIP, LATER_CHIP = "310P", "950"
KNOWN_CHIPS = r"(Ascend)?(910B\d|910_93|910$)"
"""Names of the known chips in ``npu-smi``, which calls 910_93 ``Ascend910``."""

BUSY_SHARE = 0.1
"""The share of a device's memory in use that is more than an idle driver's own."""


@dataclass(frozen=True)
class Chip:
    """A chip as ``npu-smi info`` lists it; memory in MB."""

    name: str
    health: str
    used: int
    total: int


class Hardware:
    """Driver, chips and CANN: everything that torch_npu builds on.

    Attributes
    ----------
    nodes
        Names of the NPUs' device nodes.
    cann
        Folder of CANN, once `findings` has found it.
    chips
        What ``npu-smi`` lists, once `findings` has asked it.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.nodes = [n for n in host.names("/dev") if re.fullmatch(r"davinci\d+", n)]
        self.cann: str | None = None
        self.chips: list[Chip] = []

    def findings(self) -> Iterator[Finding]:
        yield self._driver()
        yield self._firmware()
        yield self._device_nodes()
        yield self._mounts()
        yield from self._npu_smi()
        yield self._cann()
        yield self._host_memory()

    def _missing(self, name: str, found: str, pass_it: str, install: str) -> Finding:
        """Return a finding about a part that only an NPU needs: a container has to get it, a host
        to have it.
        """
        if not self.host.needs_npu:
            return ok(name, NOT_NEEDED)
        return failure(name, found, pass_it if self.host.in_container else install)

    def _driver(self) -> Finding:
        folder = self.host.environment.get("ASCEND_DRIVER_PATH")
        name, path = "driver", f"{folder}/version.info" if folder else DRIVER_VERSION
        try:
            text = self.host.read(path)
        except FileNotFoundError:
            return self._missing(
                name,
                f"no {path}",
                f"start the container with -v {path}:{path}:ro",
                "install the Ascend driver of this chip",
            )
        except OSError as error:
            return warning(name, f"{path}: {error.strerror}", f"let this user read {path}")
        version = value_of(text, "Version")
        if version is None:
            return warning(name, f"{path} names no Version", "install the driver again")
        if is_older(version, TASK_UPDATES):
            return bad_if(self.host.needs_npu)(
                name,
                f"{version}: it can't update captured attention, so full graphs are off",
                f"install driver {QUEUES} or newer",
            )
        if is_older(version, QUEUES):
            return warning(
                name,
                f'{version}: captures may fail with "Alloc sq cq fail"',
                f"install driver {QUEUES} or newer, or give fewer cudagraph_capture_sizes",
            )
        return ok(name, version)

    def _firmware(self) -> Finding:
        path = "/usr/local/Ascend/firmware/version.info"
        try:
            version = value_of(self.host.read(path), "Version")
        except OSError:
            version = None
        unknown = "not told: containers don't get its version.info"
        if not self.host.needs_npu:
            unknown = NOT_NEEDED
        return ok("firmware", version or unknown)

    def _device_nodes(self) -> Finding:
        name, bad = "device nodes", bad_if(self.host.needs_npu)
        if not self.nodes:
            return self._missing(
                name,
                "no /dev/davinci<N>",
                "start the container with --device /dev/davinci0 "
                + " ".join(f"--device {node}" for node in CONTROL_NODES),
                "install the Ascend driver, then look for this chip with lspci",
            )
        missing = [node for node in CONTROL_NODES if not self.host.exists(node)]
        found = ", ".join(f"/dev/{node}" for node in self.nodes)
        if missing:
            return bad(
                name,
                f"{found}, but no {', '.join(missing)}",
                "start the container with " + " ".join(f"--device {node}" for node in missing)
                if self.host.in_container
                else "load the driver's modules: install it again, or restart the host",
            )
        closed = [n for n in (*(f"/dev/{n}" for n in self.nodes), *CONTROL_NODES) if self._shut(n)]
        if closed:
            return bad(
                name,
                f"{found}; this user may not open {', '.join(closed)}",
                "run as root or as a member of the nodes' group (HwHiAiUser)",
            )
        return ok(name, found)

    def _shut(self, node: str) -> bool:
        return not os.access(self.host.path(node), os.R_OK | os.W_OK)

    def _mounts(self) -> Finding:
        missing = [path for path in MOUNTS if not self.host.exists(path)]
        lib64 = "/usr/local/Ascend/driver/lib64"
        if lib64 not in missing and not self.host.names(lib64):
            missing.append(lib64)
        if not missing:
            return ok("driver files", ", ".join(MOUNTS))
        return self._missing(
            "driver files",
            f"missing or empty: {', '.join(missing)}",
            "start the container with " + " ".join(f"-v {path}:{path}:ro" for path in missing),
            "install the Ascend driver of this chip",
        )

    # ----------------------------------------------------------------- npu-smi

    def _npu_smi(self) -> Iterator[Finding]:
        name = "npu-smi"
        try:
            ran = self.host.run(["npu-smi", "info"], NPU_SMI_SECONDS)
        except OSError:
            binary = "/usr/local/bin/npu-smi"
            yield self._missing(
                name,
                "not found on PATH",
                f"start the container with -v {binary}:{binary}:ro",
                "install the Ascend driver, which brings it",
            )
            return
        if ran.code is None:
            yield bad_if(self.host.needs_npu)(
                name,
                f"no answer in {NPU_SMI_SECONDS:.0f} seconds",
                "the driver hangs: look at dmesg, reset the chip or restart the host",
            )
            return
        self.chips = _chips(ran.out)
        if ran.code or not self.chips:
            said = (ran.err.strip() or ran.out.strip()).splitlines()
            yield self._npu_smi_fails(ran.code, said[-1] if said else "no output")
            return
        yield self._chip_names()
        yield from self._npu_smi_version(ran.out)
        sick = [f"{i} {chip.health}" for i, chip in enumerate(self.chips) if chip.health != "OK"]
        if sick:
            do = "run npu-smi info -t health -i <NPU> for the reason"
            yield warning("health", f"chip {', '.join(sick)}", do)
        yield self._device_memory()

    def _npu_smi_fails(self, code: int, said: str) -> Finding:
        found = f"exit code {code}: {said}" if code else f"lists no NPU: {said}"
        do = "check that driver and firmware match, and that no other process uses the chip"
        if self.host.in_container:
            do = "check device nodes and driver files above; on the host, npu-smi info has to work"
        return bad_if(self.host.needs_npu)("npu-smi", found, do)

    def _chip_names(self) -> Finding:
        names = Counter(chip.name for chip in self.chips)
        found = ", ".join(f"{count} x {name}" for name, count in names.items())
        if any(LATER_CHIP in name for name in names):
            return bad_if(self.host.needs_npu)(
                "npu-smi",
                f"{found}: what operators take is known of 910B (A2) and 910_93 (A3) only",
                "use one of them, or the CPU: NPU_PREP_DEVICE=cpu",
            )
        if any(NZ_CHIP in name for name in names):
            return bad_if(self.host.needs_npu)(
                "npu-smi",
                f"{found}: Ascend310P keeps its KV cache in the NZ layout, which is not supported",
                "use an Ascend910B or Ascend910_93 device, or the CPU: NPU_PREP_DEVICE=cpu",
            )
        unknown = [name for name in names if not re.match(KNOWN_CHIPS, name)]
        if unknown:
            return warning(
                "npu-smi",
                f"{found}: {', '.join(unknown)} is neither 910B nor 910_93",
                "operators may refuse to run: the plugin was written for 910B and 910_93",
            )
        return ok("npu-smi", found)

    def _npu_smi_version(self, text: str) -> Iterator[Finding]:
        """Compare the versions of tool and driver, which ship together; else one is of another
        host.
        """
        match = re.search(r"npu-smi\s+\S+\s+Version:\s*(\S+)", text)
        driver = self._driver()
        told = driver.found.partition(":")[0]
        if match and driver_key(told) is not None and match[1].lower() != told.lower():
            yield warning(
                "npu-smi's driver",
                f"npu-smi talks to driver {match[1]}, version.info says {told}",
                "mount driver files and npu-smi of the same host, or restart it after an update",
            )

    def _device_memory(self) -> Finding:
        used = ", ".join(f"{chip.used:,} of {chip.total:,} MB" for chip in self.chips)
        busy = [
            str(i)
            for i, chip in enumerate(self.chips)
            if chip.total and chip.used > BUSY_SHARE * chip.total
        ]
        if busy:
            return warning(
                "device memory",
                f"in use: {used}",
                f"chip {', '.join(busy)}: end what runs there (npu-smi info lists it), choose "
                "another with ASCEND_RT_VISIBLE_DEVICES, or lower --gpu-memory-utilization",
            )
        return ok("device memory", f"in use: {used}")

    # ----------------------------------------------------------------- what is installed

    def _cann(self) -> Finding:
        environment = self.host.environment
        homes = [environment.get(n) for n in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
        for folder in (*filter(None, homes), *CANN_FOLDERS):
            path = f"{folder}/{self.host.machine}-linux/ascend_toolkit_install.info"
            try:
                version = value_of(self.host.read(path), "version")
            except OSError:
                continue
            self.cann = folder
            break
        else:
            return self._missing(
                "CANN",
                "no ascend_toolkit_install.info below ASCEND_HOME_PATH or /usr/local/Ascend",
                "use an image of the CANN project, or set ASCEND_HOME_PATH",
                "install the CANN toolkit and kernels of this chip, or set ASCEND_HOME_PATH",
            )
        numbers = re.match(r"(\d+)\.(\d+)", version or "")
        table = ".".join(map(str, CANN_IN_TABLE))
        if not numbers:
            return warning("CANN", f"{path} names no version", f"install CANN {table} or newer")
        release = release_of(version or "")
        if release is None:
            return bad_if(self.host.needs_npu)(
                "CANN",
                f"{version} in {folder}: what its fused attention takes is not known",
                f"install CANN {OLDEST.name} or newer",
            )
        if tuple(map(int, numbers.groups())) < CANN_IN_TABLE:
            (wanted,) = self.host.required.get("torch_npu", ("of this plugin",))
            return warning(
                "CANN",
                f"{version} in {folder}, older than {table}; fused attention is checked by the "
                f"rules of {release.name}",
                f"install CANN {table} or newer, for torch_npu {wanted}",
            )
        return ok("CANN", f"{version} in {folder}")

    def _host_memory(self) -> Finding:
        try:
            match = re.search(r"^MemAvailable:\s+(\d+) kB", self.host.read("/proc/meminfo"), re.M)
        except OSError:
            match = None
        if match is None:
            return warning("memory", "/proc/meminfo can't be read", "mount /proc")
        free = int(match[1]) << 10
        try:
            limit: int | None = int(self.host.read("/sys/fs/cgroup/memory.max"))
        except (OSError, ValueError):  # no such file, or "max"
            limit = None
        found = f"{gib(free)} free"
        if limit is not None and limit < free:
            free, found = limit, f"{found}, limited to {gib(limit)} by the cgroup"
        if free < 4 << 30:
            return warning("memory", found, "keep 4 GiB and the size of the model's weights free")
        return ok("memory", found)


def value_of(text: str, key: str) -> str | None:
    match = re.search(rf"^{key}=(\S+)", text, re.M)
    return match[1] if match else None


def _chips(text: str) -> list[Chip]:
    """Parse the chips of ``npu-smi info``: two lines each, the second one ending with memory in
    use.
    """
    chips, first = [], None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            continue
        name = re.fullmatch(r"\d+\s+(\S+)", cells[0])
        memory = re.search(r"(\d+)\s*/\s*(\d+)$", cells[2])
        if name and re.fullmatch(r"[A-Za-z]+", cells[1]):
            first = name[1], cells[1]
        elif first and memory and ":" in cells[1]:
            chips.append(Chip(*first, int(memory[1]), int(memory[2])))
            first = None
    return chips
