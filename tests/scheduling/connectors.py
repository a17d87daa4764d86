"""KV connectors of the engines that are drawn, and what their workers return.

Each scheduler of a pair has its own connector; one worker stands for the runners of both.
"""

import operator
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from tests.scheduling.state import view
from vllm_npu_prep.attention.kv_transfer import LayersOfRank, PlaneOffloadingSpec

PLANES = "vllm_npu_prep.attention.kv_transfer"
KINDS = ("offloading", "example", "transfers", "several")
"""vLLM's two connectors that the plugin has, one of one's own, and it beside offloading."""


COUNTS = ("request_id", "status", "num_computed_tokens", "num_output_placeholders", "num_tokens")
COUNTS += ("num_in_flight_tokens", "num_stale_output_tokens", "last_sched_seq", "num_preemptions")
COUNTS += ("is_prefill_chunk", "next_decode_eligible_step")
"""What changes of a request from step to step, beside its drafts: a connector may read it."""
counts = operator.attrgetter(*COUNTS)


class Jobs(KVConnectorMetadata):
    """What `Transfers` tells its worker in a step: requests to send, and blocks to receive."""

    def __init__(self) -> None:
        self.send: list[str] = []
        self.receive: list[tuple[str, list[int], bool]] = []  # the last: whether steps go on


class Transfers(KVConnectorBase_V1, SupportsHMA):
    """Sends and receives blocks as a request's ``kv_transfer_params`` say, and notes every call.

    With each call it notes the state of all requests that it was told of.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.calls: list[Any] = []
        self.known: dict[str, Any] = {}
        self.jobs, self.sending, self.events = Jobs(), 0, 0
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.waits_for_sends, self.size = extra["waits_for_sends"], extra["block_size"]

    def note(self, name: str, *arguments: Any) -> None:
        requests = [(*counts(each), *each.spec_token_ids) for each in self.known.values()]
        self.calls.append([name, view(arguments), requests])

    def on_new_request(self, request: Any) -> None:
        self.known[request.request_id] = request
        self.note("new", request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self.note("matched", request, num_computed_tokens)
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        if params["unknown"]:
            params["unknown"] -= 1
            return None, False
        whole = request.num_prompt_tokens - (0 if params["later"] else 1)
        count = min(params["stored"], whole) // self.size * self.size - num_computed_tokens
        return (count, params["later"]) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = blocks.get_block_ids()
        self.note("allocated", request, ids, num_external_tokens)
        if num_external_tokens:
            request.kv_transfer_params["do_remote_prefill"] = False
            later = request.kv_transfer_params["later"]
            self.jobs.receive.append((request.request_id, ids[0], later))

    def build_connector_meta(self, scheduler_output: Any) -> Jobs:
        state = scheduler_output.kv_connector_block_state
        blocks = {each: state.get_block_ids(each) for each in sorted(self.known)}
        self.note("step", scheduler_output, sorted(state.req_ids), blocks)
        for each in scheduler_output.finished_req_ids:
            self.known.pop(each, None)
        jobs, self.jobs = self.jobs, Jobs()
        return jobs

    def update_connector_output(self, connector_output: Any) -> None:
        self.note("output", connector_output)
        self.sending -= len(connector_output.finished_sending or ())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.note("finished", request, block_ids)
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or not block_ids[0]:
            return False, None
        self.jobs.send.append(request.request_id)
        self.sending += 1
        self.events += 1
        return True, {"do_remote_prefill": True, "remote_block_ids": view(block_ids)}

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return self.request_finished_all_groups(request, (block_ids,))

    def take_events(self) -> Any:
        events, self.events = self.events, 0
        return [f"{events} sent"] if events else ()

    def has_pending_block_frees(self) -> bool:
        self.note("frees")
        return self.waits_for_sends and self.sending > 0

    def reset_cache(self) -> bool:
        self.note("reset")
        return True

    # The worker's side is `Worker`'s

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self) -> None: ...


def transfer_config(settings: Any, *, ours: bool) -> KVTransferConfig:
    """The setting of an engine with a connector; vLLM's scheduler has vLLM's offloading."""
    extra: dict[str, dict[str, Any]] = {
        "offloading": {
            "spec_name": PlaneOffloadingSpec.__name__,
            "spec_module_path": PLANES,
            "cpu_bytes_to_use": 1 << 17,
            "blocks_per_chunk": settings.chunk,
            "offload_prompt_only": settings.offload_prompt_only,
        },
        "example": {"shared_storage_path": getattr(settings, "folder", "no/path")},
        "transfers": {"waits_for_sends": settings.waits, "block_size": settings.alignment},
    }
    names = {"offloading": "OffloadingConnector", "example": "ExampleConnector"}
    names |= {"transfers": "Transfers", "several": "MultiConnector"}
    role = {"kv_role": settings.kv_role}

    def one(kind: str) -> dict[str, Any]:
        module = __name__ if kind == "transfers" else PLANES
        return {
            "kv_connector": names[kind],
            "kv_connector_module_path": None if kind == "offloading" and not ours else module,
            "kv_connector_extra_config": extra[kind],
            **role,
        }

    policy = {"kv_load_failure_policy": settings.failures}
    if settings.connector != "several":
        return KVTransferConfig(**one(settings.connector), **policy)
    both = {"connectors": [one("transfers"), one("offloading")]}
    return KVTransferConfig(
        kv_connector=names["several"], kv_connector_extra_config=both, **role, **policy
    )


def made(scheduler: Any) -> list[Any]:
    """The connectors of a scheduler: its own one, or all that it has."""
    return getattr(scheduler.connector, "sub_connectors", [scheduler.connector])


def prepare(scheduler: Any, kv_cache_config: Any) -> None:
    """Do what an engine does with its connector before the first request."""
    layers = tuple(name for group in kv_cache_config.kv_cache_groups for name in group.layer_names)
    metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata] = {(0, 0): LayersOfRank(layers)}
    for each in made(scheduler):
        each.set_xfer_handshake_metadata_pp_aware(metadata)


def view_all(scheduler: Any) -> list[Any]:
    """What the connectors of a scheduler keep, or were called with since the last time."""
    return [view_connector(each) for each in made(scheduler)]


def view_connector(connector: Any) -> Any:
    if isinstance(connector, Transfers):
        calls, connector.calls = connector.calls, []
        return calls
    side = getattr(connector, "connector_scheduler", None)
    if side is None:
        return view(connector._requests_need_load)
    manager = {name: view(value) for name, value in vars(side.manager).items() if name != "config"}
    names = ("_jobs", "_job_counter", "_block_id_to_pending_jobs", "_chunks_being_loaded")
    states = {
        name: [
            [(each.block_ids, each.next_stored_chunk_idx) for each in state.group_states],
            view([state.transfer_jobs, state.finished_signaled]),
        ]
        for name, state in side._req_status.items()
    }
    return [manager, states, [view(getattr(side, name)) for name in names]]


class Worker:
    """Stands for the runners' side: says what has ended or failed of what connectors ask for."""

    def __init__(self, scheduler: Any, settings: Any, draw: Any) -> None:
        self.settings, self.draw, self.connectors = settings, draw, made(scheduler)
        self.sending: set[str] = set()
        self.receiving: dict[str, list[int]] = {}  # blocks by request
        self.copies: dict[int, str | None] = {}  # jobs of offloading; the request, if it loads

    def run(self, metadata: Any) -> KVConnectorOutput:
        """A step, which ends with what has ended since the last one."""
        output, found = KVConnectorOutput(), []
        several = isinstance(metadata, MultiKVConnectorMetadata)
        for connector, each in zip(
            self.connectors, metadata.metadata if several else [metadata], strict=True
        ):
            if isinstance(each, Jobs):
                self.transfer(each, output)
            elif isinstance(each, OffloadingConnectorMetadata):
                output.kv_connector_worker_meta = self.copy(each, output)
            else:
                store(connector, each)
            found.append(output.kv_connector_worker_meta)
        if several and found[-1] is not None:
            output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata((None, found[-1]))
        return output

    def transfer(self, jobs: Jobs, output: KVConnectorOutput) -> None:
        self.sending |= set(jobs.send)
        for req_id, ids, later in jobs.receive:
            if later:
                self.receiving[req_id] = ids
            elif self.draw.chance(self.settings.failing, "blocks not loaded at once"):
                self.fail(req_id, ids, output)
        output.finished_sending = {each for each in sorted(self.sending) if self.draw.chance(0.3)}
        self.sending -= output.finished_sending
        ended = {each for each in sorted(self.receiving) if self.draw.chance(0.4)}
        for each in sorted(ended):
            ids = self.receiving.pop(each)
            if self.draw.chance(self.settings.failing, "blocks not loaded later"):
                self.fail(each, ids, output)
        output.finished_recving = ended
        self.draw.count["sent"] += len(output.finished_sending)
        self.draw.count["received"] += len(ended)

    def fail(self, req_id: str, ids: list[int], output: KVConnectorOutput) -> None:
        """A request's blocks were not loaded, from one of them on."""
        if len(self.settings.groups) > 1:
            output.failed_recving.add(req_id)
        else:
            output.invalid_block_ids |= set(ids[self.draw.number(0, len(ids) - 1) :])

    def copy(self, step: Any, output: KVConnectorOutput) -> OffloadingWorkerMetadata | None:
        """Jobs of offloading end some time, and at once where somebody waits for them."""
        self.copies |= dict.fromkeys(step.store_jobs)
        self.copies |= {number: job.req_id for number, job in step.load_jobs.items()}
        ended = [
            job for job in self.copies if job in (step.jobs_to_flush or ()) or self.draw.chance(0.4)
        ]
        loaded = {req_id for job in ended if (req_id := self.copies.pop(job))}
        output.finished_recving = (output.finished_recving or set()) | loaded
        self.draw.count["copied to the host"] += len(ended) - len(loaded)
        self.draw.count["copied from the host"] += len(loaded)
        return OffloadingWorkerMetadata(dict.fromkeys(ended, 1)) if ended else None


def store(connector: Any, step: Any) -> None:
    """Files of prompts, without what would be in them."""
    for each in step.requests:
        if each.is_store:
            folder = Path(connector._generate_foldername_debug(each.token_ids, [], True))
            for name in connector._files_of_prompt:
                (folder / name).touch()
