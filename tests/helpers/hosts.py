"""Hosts that the doctor is shown: a folder in place of ``/``, and canned commands."""

import json
from dataclasses import replace
from pathlib import Path

from vllm_npu_prep.inspect.doctor.host import Host, Ran
from vllm_npu_prep.inspect.doctor.probe import MARK

REQUIRED = {
    "vllm": ("0.32.0", "0.33.0"),
    "torch": ("2.13.0",),
    "torch_npu": ("2.13.0",),
    "numba": ("0.65.0",),
}
ON_NPU = {"vllm": "0.32.0", "torch": "2.13.0+cpu", "torch_npu": "2.13.0", "numba": "0.65.0"}
PLATFORM = "vllm_npu_prep.platform.NPUPlatform"
LINE = "+---------------------------+---------------+----------------------------------------+"
CANN = "/usr/local/Ascend/cann"
SOURCED = {"ASCEND_HOME_PATH": CANN, "LD_LIBRARY_PATH": f"{CANN}/lib64:/usr/lib"}
NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
FIA = {"family": "fia", "mask": "compressed"}
COMPILED = {"family": "compiled", "mask": "compressed"}
SEEN = {"visible": True, "reason": "", "device": "Ascend910B3", "total_memory": 65452113920}


def smi(*chips: tuple[str, str, int, int], version: str = "25.5.1") -> str:
    """What ``npu-smi info`` prints, for chips of a name, health, and memory in MB."""
    rows = []
    for index, (name, health, used, total) in enumerate(chips):
        rows += [
            f"| {index:<5} {name:<19} | {health:<13} | 91.5        36                0    / 0  |",
            f"| {0:<25} | 0000:C{index}:00.0  | 0           0    / 0   {used} / {total} |",
            LINE,
        ]
    head = [
        LINE,
        f"| npu-smi {version}                 Version: {version}                          |",
        LINE,
        "| NPU   Name                | Health        | Power(W)    Temp(C)   Hugepages(page)|",
        "| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB) HBM-Usage(MB)|",
        LINE.replace("-", "="),
    ]
    processes = ["| NPU     Chip              | Process id    | Process name |", LINE]
    return "\n".join([*head, *rows, *processes, "| No running processes found in NPU 0 |", LINE])


def probe(**answers: dict) -> Ran:
    """What the probe prints, among other things."""
    lines = [MARK + json.dumps({"name": name, **answer}) for name, answer in answers.items()]
    return Ran(0, "\n".join(["WARNING something of vLLM's", *lines]))


def loads(devices: dict, kernels: dict, platform: str = PLATFORM, *built_in: str) -> Ran:
    """A probe that got through."""
    return probe(
        torch={"version": "2.13.0+cpu"},
        devices=devices,
        kernels=kernels,
        platform={"platform": platform, "built_in": list(built_in)},
    )


def run(npu_smi: Ran | None, probed: Ran):
    """Stands for `run_command`; without ``npu-smi`` there is no such command."""

    def run_command(command: list[str], seconds: float) -> Ran:
        assert 0 < seconds < 1000
        if command[0] != "npu-smi":
            return probed
        if npu_smi is None:
            raise FileNotFoundError(2, "No such file or directory", "npu-smi")
        return npu_smi

    return run_command


def write(root: Path, path: str, text: str = "") -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def bare(root: Path) -> Host:
    """A laptop: the CPU fallback and nothing of Ascend's."""
    write(root, "/proc/meminfo", "MemTotal:  32768000 kB\nMemAvailable:   16777216 kB\n")
    (root / "dev").mkdir()
    versions = {name: version for name, version in ON_NPU.items() if name != "torch_npu"}
    devices = {"visible": False, "reason": "torch_npu is not installed"}
    return Host(
        root,
        {},
        versions,
        REQUIRED,
        ("npu_prep",),
        run(None, loads(devices, COMPILED)),
        (3, 11),
        "aarch64",
    )


def with_driver(root: Path, version: str = "25.5.1") -> None:
    """Driver, firmware and nodes of two NPUs."""
    driver = "/usr/local/Ascend/driver"
    write(root, f"{driver}/version.info", f"Version={version}\nascendhal_version=7.35.23\n")
    write(root, f"{driver}/lib64/libascend_hal.so")
    write(root, "/usr/local/Ascend/firmware/version.info", "Version=7.7.0.6.236\n")
    write(root, "/usr/local/dcmi/libdcmi.so")
    write(root, "/etc/ascend_install.info", "UserName=HwHiAiUser\n")
    for name in ("davinci0", "davinci1", *NODES):
        write(root, f"/dev/{name}")


def with_cann(root: Path, version: str = "9.1.0", folder: str = CANN) -> None:
    """CANN's toolkit."""
    write(root, f"{folder}/aarch64-linux/ascend_toolkit_install.info", f"version={version}\n")
    write(root, f"{folder}/lib64/libascendcl.so")


def ascend_910b(root: Path) -> Host:
    """Two NPUs, and all as it should be."""
    host = bare(root)
    with_driver(root)
    with_cann(root)
    chips = smi(("910B3", "OK", 3360, 65536), ("910B3", "OK", 3355, 65536))
    return replace(
        host,
        environment=SOURCED | {"ASCEND_RT_VISIBLE_DEVICES": "0,1"},
        versions=ON_NPU,
        run=run(Ran(0, chips), loads(SEEN, FIA)),
    )


def container_without_devices(root: Path) -> Host:
    """CANN's image, started without any option."""
    host = bare(root)
    with_cann(root)
    write(root, "/.dockerenv")
    reason = "torch_npu is installed, but sees no NPU"
    refused = f"vllm_npu_prep: error: NPU_PREP_DEVICE=auto: {reason}"
    probed = probe(
        torch={"version": "2.13.0+cpu"},
        devices={"visible": False, "reason": reason},
        kernels={"error": f"PrepError: NPU_PREP_DEVICE=auto: {reason}"},
        platform={"error": refused},
    )
    return replace(host, environment=SOURCED, versions=ON_NPU, run=run(None, probed))


def container_without_driver_files(root: Path) -> Host:
    """Devices are passed, the driver's files are not; versions don't fit; nothing is sourced."""
    host = bare(root)
    with_cann(root, "8.2.RC1", "/usr/local/Ascend/ascend-toolkit/latest")
    write(root, "/run/.containerenv")
    for name in ("davinci0", *NODES[:2]):
        write(root, f"/dev/{name}")
    write(root, "/usr/local/Ascend/driver/lib64/.keep")
    (root / "usr/local/Ascend/driver/lib64/.keep").unlink()
    failed = Ran(
        255, "", "dcmi model initialized failed, because the device is used. ret is -8020\n"
    )
    error = "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
    return replace(
        host,
        environment={"ASCEND_RT_VISIBLE_DEVICES": "2", "HCCL_IF_IP": "10.0.0.1"},
        versions=ON_NPU | {"torch_npu": "2.12.0", "vllm": "0.31.0"},
        run=run(failed, probe(torch={"error": error})),
    )


def cuda_host(root: Path) -> Host:
    """vLLM for CUDA, with this plugin installed beside it."""
    host = bare(root)
    devices = {"visible": False, "reason": "torch_npu is not installed"}
    probed = loads(devices, COMPILED, "vllm.platforms.cuda.NvmlCudaPlatform", "cuda")
    versions = dict(host.versions) | {"torch": "2.13.0+cu130"}
    return replace(host, versions=versions, run=run(None, probed))


def ascend_310p(root: Path) -> Host:
    """A chip that is refused, under a driver of another host than its files."""
    host = ascend_910b(root)
    with_driver(root, "24.1.rc3")
    chips = smi(("310P3", "Warning", 1621, 21534), version="25.2.0")
    refused = loads(SEEN | {"device": "Ascend310P3", "total_memory": 22580035584}, FIA)
    return replace(host, environment=SOURCED, run=run(Ran(0, chips), refused))


HOSTS = {
    host.__name__: host
    for host in (
        bare,
        ascend_910b,
        container_without_devices,
        container_without_driver_files,
        cuda_host,
        ascend_310p,
    )
}
