"""Options of an emulated run, and the environment variables that carry them.

`ascend-emulator` sets the variables. `native/runtime/options.cpp` reads them, and the references
read the profile and the faults.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from ascend_emulator import profiles
from ascend_emulator.calls import CALLS
from ascend_emulator.errors import EmulatorError
from ascend_emulator.faults import FAULTS_VARIABLE
from ascend_emulator.profiles import PROFILE, SOC

GIB = 1 << 30
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
DELAYS = ("none", "equal", "skewed")
HAZARDS = ("error", "warn")
FEWEST_STREAMS = 2
"""torch_npu creates this many streams when it is initialised."""
STREAMS_OF_A_DEVICE = 2048
"""Streams of A2 and A3; vllm-ascend's stream budget begins with 1800 of them."""
MOST_STREAMS = 1 << 15
"""Streams of A3 from driver 25.5.1 and CANN 8.5 on: so many graphs were captured there
(vllm-project/vllm-ascend 9572, 9962)."""

CHIPS = (
    *("Ascend310B1", "Ascend310B2", "Ascend310B3", "Ascend310B4"),
    *("Ascend310P1", "Ascend310P2", "Ascend310P3", "Ascend310P4", "Ascend310P5", "Ascend310P7"),
    *("Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA"),
    *("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4", "Ascend910B4-1"),
    *("Ascend910_9362", "Ascend910_9363", "Ascend910_9372", "Ascend910_9381", "Ascend910_9382"),
    *("Ascend910_9391", "Ascend910_9392"),
)
"""Chips by the names that torch_npu 2.13.0 knows, up to the A3 generation; this runtime knows no
later ones. torch_npu treats any other name as a chip without features."""

CANN = "NPU_EMULATOR_CANN"
DRIVER = "NPU_EMULATOR_DRIVER"
DEVICES = "NPU_EMULATOR_DEVICES"
MEMORY = "NPU_EMULATOR_MEMORY"
STREAMS = "NPU_EMULATOR_STREAMS"
HCCL_STREAMS = "NPU_EMULATOR_HCCL_STREAMS"
DELAY = "NPU_EMULATOR_DELAY"
HAZARD_MODE = "NPU_EMULATOR_HAZARDS"
ALLOWED_HAZARDS = "NPU_EMULATOR_ALLOWED_HAZARDS"
TRACE = "NPU_EMULATOR_TRACE"
REPORT = "NPU_EMULATOR_REPORT"
HANG_SECONDS = "NPU_EMULATOR_HANG_SECONDS"
LIBRARIES = "NPU_EMULATOR_LIBRARIES"
REFERENCES = "NPU_EMULATOR_REFERENCES"
DRIVER_FOLDER = "ASCEND_DRIVER_PATH"
"""Folder of the driver's ``version.info``; /usr/local/Ascend/driver on a host with devices."""


@dataclass(frozen=True)
class Options:
    """Options of one emulated run."""

    soc: str = "Ascend910B1"
    """Name that the runtime reports; torch_npu and plugins derive the generation from it."""
    profile: str = profiles.DEFAULT
    """Profile whose kernels, and whose word, the references follow."""
    cann: str = profiles.PROFILES[profiles.DEFAULT].cann
    """CANN version that the runtime reports."""
    driver: str = "25.5.1"
    """Driver version that the runtime and the driver's ``version.info`` report."""
    devices: int = 1
    memory_bytes: int = 8 * GIB
    """Memory of one device; host memory is only used for what is written."""
    streams: int = 2048
    """Streams of one device, with those that captured graphs hold."""
    hccl_streams: int = 2
    """Streams that a communication group holds in each graph that it is captured in."""
    delay: str = "none"
    """Wait before each task: none, the same on all streams, or a different one for each stream."""
    hazards: str = "error"
    """Whether a hazard makes the next sync fail or is only reported."""
    allowed_hazards: tuple[str, ...] = ()
    """Patterns of the shell; a hazard in which one of them occurs is only listed in the report."""
    trace: bool = False
    report: Path | None = None
    """File for the merged JSON report."""
    calls: Path | None = None
    """File for the distinct calls of operators."""
    hang_seconds: int = 30
    """How long a stream may wait for an external event before it counts as hung."""
    references: tuple[str, ...] = ()
    """Modules with operator references, imported after torch_npu in every process."""
    faults: tuple[str, ...] = ()
    """Silent misbehaviour of kernels that is switched on: names of `ascend_emulator.faults`."""

    def environment(self, libraries: Path, report_folder: Path) -> dict[str, str]:
        """Return environment variables for the command.

        `libraries` is the folder of the built libraries; each process writes its part of the report
        to `report_folder`.
        """
        return {
            SOC: self.soc,
            PROFILE: self.profile,
            CANN: self.cann,
            DRIVER: self.driver,
            DRIVER_FOLDER: str(report_folder / "driver"),
            DEVICES: str(self.devices),
            MEMORY: str(self.memory_bytes),
            STREAMS: str(self.streams),
            HCCL_STREAMS: str(self.hccl_streams),
            DELAY: self.delay,
            HAZARD_MODE: self.hazards,
            ALLOWED_HAZARDS: "\n".join(self.allowed_hazards),
            TRACE: "1" if self.trace else "0",
            REPORT: str(report_folder),
            HANG_SECONDS: str(self.hang_seconds),
            LIBRARIES: str(libraries),
            REFERENCES: ",".join(self.references),
            FAULTS_VARIABLE: ",".join(self.faults),
            CALLS: str(report_folder) if self.calls else "",
        }


def check_soc(soc: str) -> str:
    """Return the name of a chip.

    Raises
    ------
    EmulatorError
        If it is not among `CHIPS`; it suggests the closest one.
    """
    if soc not in CHIPS:
        near = difflib.get_close_matches(soc, CHIPS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise EmulatorError(
            f"--soc {soc!r} is not a chip of this emulator{hint}; use one of {', '.join(CHIPS)}"
        )
    return soc


def check_driver(version: str) -> str:
    """Return a driver version.

    Raises
    ------
    EmulatorError
        If torch_npu could not compare it with another (``DriverVersionToNum`` in its sources).
    """
    tail = r"(\d+|T\d+|\d+\.\d+|\d+\.b\d+|RC\d+(\.(\d+|alpha\d+|beta\d+))?)"
    if not re.fullmatch(r"\d+\.\d+\." + tail, version, re.IGNORECASE):
        raise EmulatorError(
            f"--driver {version!r} is not a version of a driver; write for example 25.5.1 or "
            "24.1.RC3"
        )
    return version


def check_streams(streams: int, hccl_streams: int) -> None:
    """Check the number of streams of a device, and of those that a communication group holds.

    Raises
    ------
    EmulatorError
        If torch_npu could not start with so few, or a device does not have so many.
    """
    if not FEWEST_STREAMS <= streams <= MOST_STREAMS:
        raise EmulatorError(
            f"--streams {streams} is not between {FEWEST_STREAMS} and {MOST_STREAMS}"
        )
    if not 0 <= hccl_streams <= streams:
        raise EmulatorError(
            f"--hccl-streams {hccl_streams} is not between 0 and --streams {streams}"
        )


def streams_of(soc: str, driver: str, cann: str) -> int:
    version = [int(number) for number in re.findall(r"\d+", driver)]
    release = [int(number) for number in re.findall(r"\d+", cann)]
    holds_many = soc.startswith("Ascend910_93") and version >= [25, 5, 1] and release >= [8, 5]
    return MOST_STREAMS if holds_many else STREAMS_OF_A_DEVICE


def write_driver_info(folder: Path, version: str) -> None:
    """Write ``version.info`` as the driver's installer does, as far as programs read it."""
    folder.mkdir()
    (folder / "version.info").write_text(f"Version={version}\npackage_version={version}\n")


def bytes_of(text: str) -> int:
    """Return the bytes of a size such as ``512M`` or ``8G`` (binary units).

    Raises
    ------
    EmulatorError
        If the text is not a size.
    """
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise EmulatorError(f"--memory {text!r} is not a size; write for example 512M or 8G")
    return int(match[1]) * UNITS[match[2]]
