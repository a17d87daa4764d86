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

    Upstream asks for these one after the other; whoever is asked looks here.
    """

    step: PreparedStep
    staged: StagedArrays  # its arrays on the host and on the device
    metadata: dict[str, AscendMetadata]  # by layer
    dispatched: tuple[Any, ...]  # upstream's decision: graph mode, batch descriptor, and the rest
    prompt_embeds: PromptEmbeds | None = None  # of prompts given as embeddings


class DummyRun(NamedTuple):
    """What upstream wants of a dummy run while it is under way."""

    attends: bool  # also without a full graph, to warm attention up
    captures: bool  # it is the capture of a graph
