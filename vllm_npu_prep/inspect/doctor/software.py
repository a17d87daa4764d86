"""Checks Python, torch, torch_npu and vLLM, and what importing them leads to."""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from vllm_npu_prep.aclnn import FUNCTIONS, first_release, release_with
from vllm_npu_prep.compat.releases import note_on_torch
from vllm_npu_prep.inspect.doctor.finding import Finding, bad_if, failure, ok, warning
from vllm_npu_prep.inspect.doctor.hardware import Hardware
from vllm_npu_prep.inspect.doctor.host import Host, Ran, gib, set_env_of
from vllm_npu_prep.inspect.doctor.probe import MARK

PROBE_SECONDS = 180.0
"""The time that the probe gets: torch and vLLM take ten seconds to import, more on a busy host."""


class Software:
    """Findings about the software that builds on CANN."""

    def __init__(self, host: Host, hardware: Hardware) -> None:
        self.host, self.hardware = host, hardware

    def findings(self) -> Iterator[Finding]:
        yield self._python()
        for name in ("torch", "torch_npu", "vllm"):
            yield self._package(name)
        yield from self._probe()

    def _python(self) -> Finding:
        found = ".".join(map(str, self.host.python))
        if not (3, 11) <= self.host.python <= (3, 12):
            return failure("python", found, "use Python 3.11 or 3.12")
        return ok("python", found)

    def _package(self, name: str) -> Finding:
        version, wanted = self.host.versions.get(name), self.host.required.get(name, ())
        pin = f"{name}=={wanted[0]}" if wanted else name
        if version is None and name == "torch_npu":
            if self.host.asked == "npu" or (
                self.host.asked == "auto" and (self.hardware.nodes or self.hardware.chips)
            ):
                do = f"pip install {pin}" + ", or set NPU_PREP_DEVICE=cpu" * (
                    self.host.asked != "npu"
                )
                found = "not installed, so this host's NPUs are not used"
                return bad_if(self.host.asked == "npu")(name, found, do)
            return ok(name, "not installed; the CPU fallback needs none")
        if version is None:
            return failure(name, "not installed", f"run scripts/install.sh, or pip install {pin}")
        if not wanted or _release(version) in map(_release, wanted):
            note = note_on_torch(_release(version)) if name == "vllm" else ""
            return ok(name, f"{version}; {note}" if note else version)
        how = "built with VLLM_TARGET_DEVICE=empty, as scripts/install.sh does"
        return failure(
            name,
            f"{version}, the plugin was tested with {' and '.join(wanted)}",
            f"pip install {pin}" + f", {how}" * (name == "vllm"),
        )

    # ----------------------------------------------------------------- what needs imports

    def _probe(self) -> Iterator[Finding]:
        command = [sys.executable, "-m", "vllm_npu_prep.inspect.doctor.probe"]
        try:
            ran = self.host.run(command, PROBE_SECONDS)
        except OSError as error:
            yield failure("imports", f"{sys.executable}: {error.strerror}", "repair Python")
            return
        answers = _answers(ran.out)
        for name, (label, tell) in {
            "torch": ("import torch", self._tell_torch),
            "devices": ("torch_npu sees", self._tell_devices),
            "kernels": ("kernels and masks", self._tell_kernels),
            "platform": ("platform", self._tell_platform),
        }.items():
            answer = answers.get(name)
            if answer is None:
                yield self._no_answer(label, ran)
                return
            if "error" not in answer:
                yield tell(label, answer)
                yield from _functions(answer.get("missing"))
            elif not (name == "kernels" and answer["error"].startswith("PrepError")):
                yield self._import_fails(label, answer["error"])
            if "error" in answer and name == "torch":  # nothing else can be asked
                return

    def _no_answer(self, name: str, ran: Ran) -> Finding:
        if ran.code is None:
            found = f"no answer in {PROBE_SECONDS:.0f} seconds"
            return failure(name, found, "look at the NPU with npu-smi info, and at dmesg")
        last = ran.err.strip().splitlines()[-1:] or ["no output"]
        return failure(
            name,
            f"the process that imports them ended with exit code {ran.code}: {last[0]}",
            "run python -m vllm_npu_prep.inspect.doctor.probe to see its whole output",
        )

    def _import_fails(self, name: str, error: str) -> Finding:
        module = "torch" if name == "import torch" else "vllm"
        do = f"run python -c 'import {module}' to see the whole error"
        if name == "import torch" and "torch_npu" in self.host.versions:
            do = (
                f"source {set_env_of(self.hardware.cann)}: torch loads torch_npu, which needs the "
                "libraries of CANN and of the driver on LD_LIBRARY_PATH"
            )
        elif error.startswith("vllm_npu_prep: error:"):
            do = "follow this message"
        return failure(name, error, do)

    def _tell_torch(self, name: str, answer: dict[str, Any]) -> Finding:
        return ok(name, f"loads, {answer['version']}")

    def _tell_devices(self, name: str, answer: dict[str, Any]) -> Finding:
        if answer["visible"]:
            return ok(name, f"{answer['device']}, {gib(answer['total_memory'])}")
        if self.host.needs_npu:
            return failure(
                name,
                f"no NPU: {answer['reason']}",
                "fix the failures above, or run on the CPU with NPU_PREP_DEVICE=cpu",
            )
        return ok(name, f"no NPU: {answer['reason']}")

    def _tell_kernels(self, name: str, answer: dict[str, Any]) -> Finding:
        return ok(name, f"{answer['family']}, {answer['mask']} masks")

    def _tell_platform(self, name: str, answer: dict[str, Any]) -> Finding:
        platform = answer["platform"]
        if platform.startswith("vllm_npu_prep."):
            return ok(name, f"{platform}: the plugin is active")
        allowed = self.host.environment.get("VLLM_PLUGINS")
        if "npu_prep" not in self.host.platform_plugins:
            why, do = "no entry point npu_prep is installed", "pip install vllm_npu_prep here"
        elif allowed is not None and "npu_prep" not in allowed.split(","):
            why, do = f"VLLM_PLUGINS={allowed}", "add npu_prep to VLLM_PLUGINS, or unset it"
        elif answer["built_in"]:
            works = ", ".join(answer["built_in"])
            why = (
                f"vLLM's own platform works here ({works}) and NPU_PREP_DEVICE is {self.host.asked}"
            )
            do = "nothing, if you want that platform; otherwise set NPU_PREP_DEVICE to npu or cpu"
        else:
            why, do = "vLLM chose another plugin", "set VLLM_PLUGINS=npu_prep"
        is_wanted = self.host.asked == "auto" and bool(answer["built_in"])
        found = f"{platform}; the plugin is inactive: {why}"
        return bad_if(not is_wanted)(name, found, do)


def _functions(missing: dict[str, str] | None) -> Iterator[Finding]:
    name = "CANN's functions"
    if missing is None:
        return
    if not missing:
        yield ok(name, f"all {len(set(FUNCTIONS.values()))} that the plugin's operators call")
        return
    by_release: dict[str, list[str]] = {}
    for operator, function in missing.items():
        by_release.setdefault(first_release(function), []).append(f"{function} ({operator})")
    found = "; ".join(
        f"no {', '.join(functions)}, which CANN {release} has"
        for release, functions in by_release.items()
    )
    release = release_with(missing.values())
    do = f"install CANN {release} or newer; start-up refuses models that need one of these"
    yield warning(name, found, do)


def _answers(text: str) -> dict[str, dict[str, Any]]:
    answers = {}
    for line in text.splitlines():
        if line.startswith(MARK):
            answer = json.loads(line[len(MARK) :])
            answers[answer["name"]] = answer
    return answers


def _release(version: str) -> str:
    """Return ``2.13.0`` of ``2.13.0+cpu`` and ``2.13.0.post1``."""
    match = re.match(r"[\d.]*\d", version)
    return match[0] if match else version
