"""A KV connector of one's own, as MooncakeConnector: pulls blocks while the engine goes on.

It notes every call. Its transport is a dict of this process.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

CALLS: list[tuple[Any, ...]] = []
"""What was called, in order: a name, and what matters of its arguments."""

SENT: dict[tuple[int, ...], dict[str, list[torch.Tensor]]] = {}
"""Blocks of each layer and plane by prompt, as the other side would hold them."""


@dataclass
class Jobs(KVConnectorMetadata):
    """What the scheduler tells workers in a step."""

    send: list[tuple[str, tuple[int, ...], list[int]]] = field(default_factory=list)
    receive: list[tuple[str, tuple[int, ...], list[int]]] = field(default_factory=list)


class PullingConnector(KVConnectorBase_V1):
    """Sends the full blocks of each finished prompt, and pulls those of prompts that were sent."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        self._jobs = Jobs()
        self._caches: dict[str, Any] = {}  # of each layer its planes
        self._sent: set[str] = set()
        self._arriving: set[str] = set()
        self._received: set[str] = set()

    def _prompt(self, request: Any) -> tuple[int, ...]:
        ids = request.prompt_token_ids
        return tuple(ids[: (len(ids) - 1) // self._size * self._size])

    # ----------------------------------------------------------------- the scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        found = self._prompt(request)
        count = len(found) - num_computed_tokens if found in SENT else 0
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            count = len(self._prompt(request)) // self._size
            (ids,) = blocks.get_block_ids()
            first = count - num_external_tokens // self._size
            assert first == 0, "the test resets the prefix cache"
            self._jobs.receive.append((request.request_id, self._prompt(request), ids[:count]))
            CALLS.append(("allocated", request.request_id, ids[:count]))

    def build_connector_meta(self, scheduler_output: Any) -> Jobs:
        jobs, self._jobs = self._jobs, Jobs()
        return jobs

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        prompt = self._prompt(request)
        if not prompt or prompt in SENT:
            return False, None
        ids = block_ids[: len(prompt) // self._size]
        self._jobs.send.append((request.request_id, prompt, ids))
        CALLS.append(("finished", request.request_id, ids))
        return True, {"remote_block_ids": ids}  # the blocks stay until they are sent

    # ----------------------------------------------------------------- the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches
        CALLS.append(("register", {name: each[0].data_ptr() for name, each in kv_caches.items()}))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        jobs = self._get_connector_metadata()
        CALLS.append(("load", [job[0] for job in jobs.receive]))
        for req_id, prompt, ids in jobs.send:
            SENT[prompt] = {
                name: [plane[ids].clone() for plane in cache]
                for name, cache in self._caches.items()
            }
            self._sent.add(req_id)
        self._received |= self._arriving  # what began in the step before has arrived
        self._arriving = set()
        for req_id, prompt, ids in jobs.receive:
            for name, cache in self._caches.items():
                for plane, rows in zip(cache, SENT[prompt][name], strict=True):
                    plane[ids] = rows
            self._arriving.add(req_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        CALLS.append(("wait", layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        CALLS.append(("save", layer_name, kv_layer.data_ptr()))

    def wait_for_save(self) -> None:
        CALLS.append(("saved",))

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, self._sent = self._sent, set()
        received, self._received = self._received, set()
        CALLS.append(("done", sorted(sent), sorted(received)))
        return sent, received
