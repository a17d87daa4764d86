"""Outputs that report a step which failed after it was launched."""

from collections.abc import Callable
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


class WatchedOutput(AsyncModelRunnerOutput):
    """An asynchronous output that tells when the wait for it fails.

    With asynchronous scheduling, a step that fails on the device does so after `execute_model` has
    returned: where its samples are waited for. With several ranks, that is in another thread.
    `tell` gets the error, which is raised afterwards.
    """

    def __init__(self, output: Any, tell: Callable[[Exception], None]) -> None:
        self._output, self._tell = output, tell

    def get_output(self) -> ModelRunnerOutput:
        try:
            return self._output.get_output()
        except Exception as error:
            self._tell(error)
            raise

    def get_kv_connector_output(self) -> Any:
        """Return vLLM's, which release 0.33.0 asks for even of a step that failed."""
        return self._output.get_kv_connector_output()
