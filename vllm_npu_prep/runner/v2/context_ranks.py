"""Prefill context parallelism of the V2 runner: what upstream asks of its manager, and the hidden
states that ranks gather before they sample.

Upstream prepares a step of all requests, and its manager makes a rank's of it by some fifteen
launches and five copies. Here a step has both in its one copy (`vllm_npu_prep.prep.pcp`), so little
is left for the manager. Upstream's gathers the hidden states of all tokens; those that are sampled
suffice, unless a request wants its prompt scored.
"""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pcp_group
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pcp_manager import PCPManager

from vllm_npu_prep.runner.step import StepInFlight


class NPUPCPManager(PCPManager):
    """Upstream's manager of ranks, with steps that are shared out already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make no buffers: the arrays of a step are all in the staging ring's."""

    @staticmethod
    def validate_config(vllm_config: VllmConfig, supports_mm_inputs: bool) -> None:
        """Allow what start-up allows (`vllm_npu_prep.startup.subjects.ranks`): upstream refuses all
        but latent attention."""

    def get_num_tokens_for_dispatch(
        self, num_scheduled_tokens: np.ndarray, is_prefilling: np.ndarray
    ) -> int:
        """Return any number: padding is decided already, and the graph manager knows it."""
        return int(num_scheduled_tokens.sum())

    def set_block_tables(self, block_tables: Any) -> None:  # from vLLM 0.33 on
        """Do nothing: steps have the block tables of their rows."""

    def prepare_inputs_to_capture(self, input_batch: InputBatch) -> InputBatch:
        return input_batch

    prepare_inputs_for_capture_or_profile = prepare_inputs_to_capture  # its name from 0.33 on


def gather_sampled(hidden_states: torch.Tensor, in_flight: StepInFlight) -> torch.Tensor:
    """Return the hidden states of all requests' last tokens, ``[num_reqs, hidden_size]``.

    `hidden_states` are those of this rank's tokens.
    """
    step, arrays = in_flight.step, in_flight.staged.device
    chosen = hidden_states.index_select(0, arrays.pcp_logits_indices[: step.pcp.num_samples])
    gathered = get_pcp_group().all_gather(chosen, dim=0)
    return gathered.index_select(0, arrays.pcp_gathered_rows[: step.num_reqs])


def gather_all(hidden_states: torch.Tensor, in_flight: StepInFlight) -> torch.Tensor:
    """Return the hidden states of all tokens in the order of the batch, ``[T, hidden_size]``."""
    places = torch.from_numpy(in_flight.step.gathered_places()).to(hidden_states.device)
    return get_pcp_group().all_gather(hidden_states, dim=0).index_select(0, places)
