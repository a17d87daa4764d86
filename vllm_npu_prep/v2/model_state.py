"""The model's state in upstream's V2 runner: gives layers the metadata that was prepared."""

from typing import Any

from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_npu_prep.attention.metadata import AscendMetadata


class PreparedModelState(DefaultModelState):
    """Upstream's state of a decoder-only model; metadata comes from the prepared step.

    Attributes
    ----------
    metadata
        Of the step in flight, by layer; None in dummy runs, which run no attention.
    """

    metadata: dict[str, AscendMetadata] | None = None

    def prepare_attn(  # type: ignore[override]
        self, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> dict[str, Any] | None:
        """The metadata by layer; it is not built again."""
        return self.metadata
