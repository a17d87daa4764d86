"""What the plugin logs about graphs, whatever vLLM has done to its loggers."""

from typing import Any

import pytest

from vllm_npu_prep.graph import counts
from vllm_npu_prep.runner import common, graphs


def record_logs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of `runner.graphs`, `runner.common` and `graph.counts` from now on."""
    lines: list[str] = []

    def record(text: str, *args: Any) -> None:
        lines.append(text % args)

    for module in (graphs, counts, common):
        for level in ("info", "warning"):
            monkeypatch.setattr(module.logger, level, record)
    return lines
