"""Options of an emulated run, and the environment variables that carry them.

`ascend-emulator` sets the variables. `native/runtime/options.cpp` reads them, and the references
read the profile and the faults.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from ascend_emulator import profiles
from ascend_emulator.errors import EmulatorError
from ascend_emulator.faults import FAULTS_VARIABLE
from ascend_emulator.profiles import PROFILE, SOC

GIB = 1 << 30
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
DELAYS = ("none", "equal", "skewed")
HAZARDS = ("error", "warn")

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
DEVICES = "NPU_EMULATOR_DEVICES"
MEMORY = "NPU_EMULATOR_MEMORY"
DELAY = "NPU_EMULATOR_DELAY"
HAZARD_MODE = "NPU_EMULATOR_HAZARDS"
TRACE = "NPU_EMULATOR_TRACE"
REPORT = "NPU_EMULATOR_REPORT"
HANG_SECONDS = "NPU_EMULATOR_HANG_SECONDS"
LIBRARIES = "NPU_EMULATOR_LIBRARIES"
REFERENCES = "NPU_EMULATOR_REFERENCES"


@dataclass(frozen=True)
class Options:
    """Options of one emulated run."""

    soc: str = "Ascend910B1"
    """Name that the runtime reports; torch_npu and plugins derive the generation from it."""
    profile: str = profiles.DEFAULT
    """Whose kernels, and whose word, the references follow."""
    cann: str = profiles.PROFILES[profiles.DEFAULT].cann
    """CANN version that the runtime reports."""
    devices: int = 1
    memory_bytes: int = 8 * GIB
    """Memory of one device; host memory is only used for what is written."""
    delay: str = "none"
    """Wait before each task: none, the same on all streams, or different per stream."""
    hazards: str = "error"
    """Whether a hazard makes the next sync fail or is only reported."""
    trace: bool = False
    report: Path | None = None
    """File for the merged JSON report."""
    hang_seconds: int = 30
    """How long a stream may wait for an external event before it counts as hung."""
    references: tuple[str, ...] = ()
    """Modules with operator references, imported after torch_npu in every process."""
    faults: tuple[str, ...] = ()
    """Silent misbehaviour of kernels that is switched on, names of `ascend_emulator.faults`."""

    def environment(self, libraries: Path, report_folder: Path) -> dict[str, str]:
        """Environment variables for the command.

        Parameters
        ----------
        libraries
            Folder of the built libraries.
        report_folder
            Folder in which each process writes its part of the report.
        """
        return {
            SOC: self.soc,
            PROFILE: self.profile,
            CANN: self.cann,
            DEVICES: str(self.devices),
            MEMORY: str(self.memory_bytes),
            DELAY: self.delay,
            HAZARD_MODE: self.hazards,
            TRACE: "1" if self.trace else "0",
            REPORT: str(report_folder),
            HANG_SECONDS: str(self.hang_seconds),
            LIBRARIES: str(libraries),
            REFERENCES: ",".join(self.references),
            FAULTS_VARIABLE: ",".join(self.faults),
        }


def check_soc(soc: str) -> str:
    """Return the name of a chip.

    Raises
    ------
    EmulatorError
        If it is not among `CHIPS`; suggests the closest one.
    """
    if soc not in CHIPS:
        near = difflib.get_close_matches(soc, CHIPS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise EmulatorError(
            f"--soc {soc!r} is not a chip of this emulator{hint}; use one of {', '.join(CHIPS)}"
        )
    return soc


def bytes_of(text: str) -> int:
    """Bytes of a size such as ``512M`` or ``8G`` (binary units).

    Raises
    ------
    EmulatorError
        If the text is not a size.
    """
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise EmulatorError(f"--memory {text!r} is not a size; write for example 512M or 8G")
    return int(match[1]) * UNITS[match[2]]
