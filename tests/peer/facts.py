"""The calls of operators that vllm-ascend made, in ``emulator/proven_calls.jsonl``.

vllm-ascend runs on cards every day, so a reference that refuses the dtypes, layouts, flags or sides
of one of its calls is wrong. Sizes prove nothing: these calls are those of small models on the
emulated card. Each line says for which release of vllm-ascend, CANN and chip it stands.
``stand_in`` marks operators of vllm-ascend's own, which our references stand in for. A line with an
``issue`` is a call that cards refuse, too, according to that issue.

    python -m tests.peer.facts    # add what the last run of `test_peer` recorded
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ascend_emulator.calls import key_of, merged
from tests.helpers.emulator import ROOT

FACTS = ROOT / "emulator" / "proven_calls.jsonl"
RECORDED = ROOT / ".cache" / "peer-calls"
"""A file of `ascend-emulator --calls` for each test."""
PINS = ROOT / "scripts" / "peer.txt"
CANN = "9.1.0"
"""What the pinned release is made for (its README); calls under another profile prove nothing."""


def read() -> list[dict[str, Any]]:
    """The committed facts."""
    return [json.loads(line) for line in FACTS.read_text().splitlines()]


def recorded(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """What these files have, each with the release that it stands for."""
    release = next(
        line.split("==")[1] for line in PINS.read_text().splitlines() if "vllm-ascend==" in line
    )
    lines = [line for path in paths for line in path.read_text().splitlines()]
    calls = merged(call for call in map(json.loads, lines) if call["cann"] == CANN)
    return [{"vllm_ascend": release, **call, **_stand_in(call)} for call in calls]


def _stand_in(call: dict[str, Any]) -> dict[str, bool]:
    return {} if call["operator"].startswith(("npu::", "atb::")) else {"stand_in": True}


def unknown(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Recorded calls that are not among the facts."""
    known = {_key(fact) for fact in read()}
    return [call for call in recorded(paths) if _key(call) not in known]


def _key(fact: dict[str, Any]) -> tuple[str, str, str]:
    return key_of(fact), fact["cann"], fact["chip"]


if __name__ == "__main__":
    found = sorted([*read(), *unknown(sorted(RECORDED.glob("*.jsonl")))], key=_key)
    FACTS.write_text("".join(f"{json.dumps(fact)}\n" for fact in found))
