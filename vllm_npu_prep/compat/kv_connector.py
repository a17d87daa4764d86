"""Patches of KV connectors: what they learn of a sleeping cache, and requests they can't serve."""

import copy
from typing import Any

from vllm_npu_prep.compat.patches import instead_of
from vllm_npu_prep.compat.releases import is_since


def forget_caches() -> None:
    """Let a KV connector drop what it registered of the cache, which is about to sleep."""
    _tell("unregister_kv_caches")


def restore_caches() -> None:
    """Let a KV connector register the cache again, which is awake at the same addresses."""
    _tell("restore_kv_caches")


def _tell(what: str) -> None:
    """Call a method that connectors have from vLLM 0.33.0 on, if there is a connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if is_since("0.33.0") and has_kv_transfer_group():
        connector: Any = get_kv_transfer_group()
        getattr(connector, what)()


def forget_hashes(connector: Any, request: Any) -> None:
    """Let the scheduler's side of a connector forget what it made of a request's block hashes.

    vLLM's offloading keeps names of its own for the blocks of each request, and assumes that their
    hashes never change. Nothing is done where there is no such list. The request holds no blocks.
    """
    offloading = getattr(connector, "connector_scheduler", None)
    status = getattr(offloading, "_req_status", {}).get(request.request_id)
    for group in status.group_states if status is not None else ():
        group.offload_keys.clear()
        group.next_stored_chunk_idx = group.num_hit_chunks = 0


def refuse_sessions_beside_offloading() -> None:
    """Refuse a session where blocks are stored in the host's memory: vLLM's engine would end.

    Its connector takes a session for finished after each answer, and fails when a store that began
    before is done (`_remove_pending_job`). It also takes the blocks of the session's next part for
    new ones behind those that it knows.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    @instead_of(InputProcessor, "process_inputs")
    def process_inputs(upstream: Any, self: "InputProcessor", *args: Any, **settings: Any) -> Any:
        transfer = self.vllm_config.kv_transfer_config
        offloads = transfer is not None and transfer.kv_connector == "OffloadingConnector"
        if offloads and settings.get("resumable"):
            raise VLLMValidationError(
                "A session (a `resumable` request, whose input comes in parts) would end an engine "
                "that offloads K and V to the host: send each part as a request of its own, behind "
                "the text before it, or serve without --kv-offloading-size"
            )
        return upstream(self, *args, **settings)


def let_preempted_requests_load_at_once() -> None:
    """Keep vLLM's offloading from ending the engine after a reset of requests that it stores.

    A reset of the prefix cache, also by a pause, takes the blocks of requests that run. The next
    step tells the connector of that, and may already load what the host has of these requests. vLLM
    then looks for stores to end, and asserts that a request's transfers are stores. A request that
    loads has no stores, so the connector isn't told of its preemption.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )

    @instead_of(OffloadingConnectorScheduler, "build_connector_meta")
    def build_connector_meta(
        upstream: Any, self: "OffloadingConnectorScheduler", scheduler_output: Any
    ) -> Any:
        loading = {job.req_id for job in self._current_batch_load_jobs.values()}
        preempted = scheduler_output.preempted_req_ids or set()
        if not loading.isdisjoint(preempted):
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.preempted_req_ids = set(preempted) - loading
        return upstream(self, scheduler_output)
