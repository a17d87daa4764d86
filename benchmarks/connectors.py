"""KV connectors of `engine_step.py`: no block is copied, and all that is asked for is done at once.

Each side of the benchmark has a worker's part of its own, since both give their jobs the same
numbers and their requests the same names.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "offloading": {"kv_offloading_size": 0.25},
    "pulled": {
        "kv_transfer_config": {
            "kv_connector": "PulledConnector",
            "kv_connector_module_path": __name__,
            "kv_role": "kv_consumer",
        }
    },
}
"""Of engines, by their connector."""


class AtOnce(OffloadingWorker):
    """Ends each job before the next question."""

    def __init__(self) -> None:
        self.jobs: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy nothing."""
        self.jobs.append(job_id)
        return True

    submit_load = submit_store

    def get_finished(self) -> list[TransferResult]:
        """Every job so far."""
        jobs, self.jobs = self.jobs, []
        return [TransferResult(job_id, True) for job_id in jobs]

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        """Nothing is held."""


class Pulled(KVConnectorMetadata):
    """The requests whose prompts a step asks for; of a worker those that it has asked for."""

    def __init__(self) -> None:
        self.requests: set[str] = set()


class PulledConnector(KVConnectorBase_V1):
    """Gets all prompts from another engine, as an instance that only decodes."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.asked, self.connector_worker = Pulled(), Pulled()
        self.loaded: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """All of a prompt, once."""
        if request.request_id in self.loaded:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Ask for a prompt in this step."""
        if num_external_tokens:
            self.asked.requests.add(request.request_id)
            self.loaded.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Pulled:
        """Tell the worker."""
        asked, self.asked = self.asked, Pulled()
        self.loaded -= scheduler_output.finished_req_ids
        return asked

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Have prompts under way."""
        self.connector_worker.requests |= self._get_connector_metadata().requests

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        """All that was asked for has come."""
        came, self.connector_worker.requests = self.connector_worker.requests, set()
        return None, came

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Layers wait for nothing."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """Nothing is sent."""

    def wait_for_save(self) -> None:
        """Nothing is sent."""


def worker_part(connector: Any) -> Any:
    """Another worker's part for the engine's connector, which copies nothing."""
    given = connector.connector_worker
    if not isinstance(given, OffloadingConnectorWorker):
        return Pulled()
    part = OffloadingConnectorWorker(given.spec, given.vllm_config, given.kv_cache_config)
    part.worker = AtOnce()
    return part


def as_upstream_has_it(connector: Any) -> None:
    """Let the scheduler's part of offloading look at each request in each step."""
    if isinstance(connector, OffloadingConnector):
        whole = OffloadingConnector.build_connector_meta
        connector.build_connector_meta = lambda step: whole(connector, step)  # type: ignore[method-assign]
