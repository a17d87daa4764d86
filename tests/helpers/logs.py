"""What the plugin logs about graphs, whatever vLLM has done to its loggers."""

from typing import Any

import pytest

from vllm_npu_prep.graph import capture, counts


def record_logs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of `graph.capture` and `graph.counts` from now on."""
    lines: list[str] = []

    def record(text: str, *args: Any) -> None:
        lines.append(text % args)

    for module in (capture, counts):
        for level in ("info", "warning"):
            monkeypatch.setattr(module.logger, level, record)
    return lines
