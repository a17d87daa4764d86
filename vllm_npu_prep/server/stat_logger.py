"""A stat-logger plugin of vLLM, by which the workers' counts come to ``/metrics``."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_npu_prep import chosen_platform


class StepStatLogger(AggregateStatLoggerBase):
    """What a server makes for the entry point ``vllm.stat_logger_plugins`` if it keeps statistics.

    Beside another platform there are no counts. They are read when ``/metrics`` is; vLLM's
    per-iteration reports don't include them.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        if chosen_platform.is_ours():
            from vllm_npu_prep.observe.metrics import expose

            expose()

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the counts don't come from here."""

    def log_engine_initialized(self) -> None:
        """Do nothing: the start-up block has logged everything."""
