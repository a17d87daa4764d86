"""The one record of a step in flight, and that of a dummy run."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.device.staging import StagedArrays
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.runner.prompt_embeds import PromptEmbeds


@dataclass(slots=True)
class StepInFlight:
    """A step from its preparation until its tokens are sampled.

    Upstream asks for these values one after the other; the overrides answer from this record.
    """

    step: PreparedStep
    staged: StagedArrays  # its arrays on the host and on the device
    metadata: dict[str, AscendMetadata]  # by layer
    dispatched: tuple[Any, ...]  # upstream's decision: graph mode, batch descriptor, and the rest
    prompt_embeds: PromptEmbeds | None = None  # of prompts given as embeddings


class DummyRun(NamedTuple):
    """What upstream asked of the dummy run that is under way."""

    attends: bool  # run attention even without a full graph, to warm it up
