"""Expert-parallel load balancing (EPLB): upstream's state of physical experts, on this device.

Upstream counts the load, chooses where experts go, and moves their weights: at once, or layer by
layer while steps go on, in a thread of its own (``use_async``).
"""

import os
import threading
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.distributed.eplb.async_worker import transfer_run_periodically
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.distributed.parallel_state import get_ep_group
from vllm.logger import init_logger

from vllm_npu_prep.compat.eplb import stream_of_exchange
from vllm_npu_prep.errors import PrepError

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


class NPUEplbState(EplbState):
    """Upstream's state, whose thread has a stream of this device, and ends the rank if it fails."""

    _placement: Mapping[str, Any] | None = None  # None: read it anew

    def add_model(self, model: Any, model_config: ModelConfig, *args: Any, **kwargs: Any) -> None:
        """Add a model whose layers have experts of one form, for they share a buffer.

        Raises
        ------
        PrepError
            If the experts of layers differ, because a part of them is quantised for example.
        """
        super().add_model(model, model_config, *args, **kwargs)
        forms = {
            tuple((each.shape, each.dtype) for each in tensors) for tensors in model.expert_weights
        }
        if len(forms) > 1:
            raise PrepError(
                f"--enable-eplb with experts that differ by layer ({model_config.model}) is not "
                "supported by vllm_npu_prep: an exchange has one buffer for all layers; leave the "
                "flag out"
            )

    def placement(self) -> Mapping[str, Any]:
        """Return where the model's experts are, as records have it, and the load behind that.

        It is read from the device once after each exchange of a layer.
        """
        if self._placement is None:
            (state,) = self.model_states.values()
            group = get_ep_group()
            self._placement = {
                "rank": group.rank_in_group,
                "num_ranks": group.world_size,
                "placed": state.physical_to_logical_map.tolist(),
                "load": state.last_expert_load.tolist(),
            }
        return self._placement

    def forget_load(self) -> None:
        """Forget what runs before the first step have counted."""
        for each in self.model_states.values():
            each.expert_load_pass.zero_()

    def prepare_forward(self, *_: Any, **__: Any) -> None:
        """Do nothing: upstream counts the tokens that are no padding, which has no expert here."""

    def step(
        self, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
    ) -> None:
        """Step as upstream does; its exchange needs no memory that a profile run would measure."""
        if is_profile:
            return
        pending = [each.pending_result for each in self.model_states.values()]
        super().step(is_dummy, is_profile, log_stats)
        states = self.model_states.values()
        if any(each.pending_result is not then for each, then in zip(states, pending)):
            self._placement = None

    def rearrange(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        self._placement = None
        return super().rearrange(*args, **kwargs)

    def start_async_loop(self, *_: Any, **__: Any) -> None:
        """Start the thread; upstream's takes CUDA and XPU devices only."""
        if self.is_async and self.async_worker is None:
            self.async_worker = threading.Thread(target=self._exchange, daemon=True, name="eplb")
            self.async_worker.start()

    def _exchange(self) -> None:
        """Exchange experts; a failure ends the process, which the executor notices at once.

        The main thread may wait for another rank, so that no exception could reach it.
        """
        try:
            transfer_run_periodically(self, stream_of_exchange(self.device))
        except BaseException as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            logger.error("An exchange of experts failed, and this rank ends with it (%s).", why)
            os._exit(1)
