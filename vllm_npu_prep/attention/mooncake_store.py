"""A pool of K and V that engines share: vLLM's connector to Mooncake's store, for planes.

Each block of a prompt is one object of the store, under a hash of all tokens up to its end.
Upstream decides what is stored and found, and which blocks a step may not give to others meanwhile.
Here an object consists of the planes of a block, each a region of its own, and threads wait for the
device:

- A store begins once the steps that were issued before it have ended. It reads what they wrote.
- So does a load: those steps may still zero its blocks, or write to them for a request that has
  ended meanwhile.
- A request whose blocks are loaded is scheduled after its load has ended.
"""

import hashlib
import os
import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector, worker
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.protocol import LOOKUP_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import (
    MooncakeStoreScheduler,
)
from vllm.utils.network_utils import make_zmq_socket

from vllm_npu_prep.attention.offloading import planes_by_block
from vllm_npu_prep.device import Transfer, copy_stream, set_device
from vllm_npu_prep.errors import PrepError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
        MooncakeStoreConnectorMetadata,
        ReqMeta,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig

SECONDS_TO_END = 5
"""Time that the thread which answers the scheduler gets to end."""


class MooncakeStoreConnector(connector.MooncakeStoreConnector):
    """vLLM's connector to Mooncake's store, for planes."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._validate_kv_cache_config(vllm_config, kv_cache_config)
        self._kv_cache_config, self._kv_cache_events = kv_cache_config, None
        given, is_worker = (vllm_config, kv_cache_config), role is KVConnectorRole.WORKER
        self.connector_scheduler = None if is_worker else MooncakeStoreScheduler(*given)
        self.connector_worker = PlaneStoreWorker(*given) if is_worker else None

    def shutdown(self) -> None:
        """End the worker, and the connection by which the scheduler asks it."""
        super().shutdown()
        if (side := getattr(self, "connector_scheduler", None)) is not None:
            side.client.close()


@dataclass
class AfterSteps:
    """The end of all steps that were issued so far, for which a thread can wait."""

    device: torch.device
    end: Transfer

    def synchronize(self) -> None:
        """Wait, also in a thread that has not used the device yet."""
        set_device(self.device)
        self.end.synchronize()


class Loads(queue.Queue["ReqMeta"]):
    """Loads, each of which a thread gets once it may begin."""

    def get(self, block: bool = True, timeout: float | None = None) -> "ReqMeta":
        """Take a load, and wait for the steps that were issued before it."""
        load = super().get(block, timeout)
        if load.current_event is not None:
            load.current_event.synchronize()
        return load


class EndOfThread:
    """Ends the thread that takes it for a request: upstream's threads have no end."""

    def __getattr__(self, name: str) -> Any:
        raise SystemExit


class PlaneStoreWorker(worker.MooncakeStoreWorker):
    """Stores and loads the planes of one rank.

    Raises
    ------
    PrepError
        If the store can't be reached.
    """

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        self._config = vllm_config
        try:
            super().__init__(vllm_config, kv_cache_config)
        except RuntimeError as error:
            raise PrepError(
                f"Mooncake's store can't be reached as {os.environ['MOONCAKE_CONFIG_PATH']} says "
                f"({str(error).rstrip('.')}); start mooncake_master at its master_server_address, "
                "and give a protocol that this host has (tcp needs nothing)"
            ) from error
        self.recv_request_queue = Loads()

    def _select_store_layout(self, extra_config: dict[str, Any]) -> tuple[None, str, None]:
        """Return a part of the names of objects, which tells planes of other forms apart.

        Upstream's names have the model's and the rank's number, but neither a dtype nor sizes.
        """
        del extra_config  # keys of other forms are refused at start-up
        specs = repr([group.kv_cache_spec for group in self._kv_cache_groups])
        return None, f"@planes:{hashlib.sha256(specs.encode()).hexdigest()[:16]}", None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register all planes, and let threads store and load them."""
        if self._capacity_only:
            return
        super().register_kv_caches({"": torch.empty(0)})  # no layer's: it only starts threads
        layers, memory = self._config.compilation_config.static_forward_context, {}
        for group, objects in zip(self._kv_cache_groups, self.token_dbs, strict=True):
            nbytes: dict[int, int] = {}  # address of a plane -> bytes of a block
            for name in group.layer_names:
                cache, num_blocks = kv_caches[name], self._kv_cache_config.num_blocks
                for plane in planes_by_block(cache, layers[name], num_blocks):
                    storage = plane.untyped_storage()
                    memory[storage.data_ptr()] = storage.nbytes()
                    nbytes[plane.data_ptr()] = plane.shape[1]
            objects.set_kv_caches_base_addr([*nbytes])
            objects.set_block_len([*nbytes.values()])
        for start, size in memory.items():
            if self.store.register_buffer(start, size) != 0:
                raise RuntimeError(f"Mooncake could not register {size:,} bytes of the KV cache")
        self._device = plane.device
        self._stream = copy_stream(self._device)

    def _after_steps(self) -> Any:
        """Return what takes the place of upstream's event."""
        return AfterSteps(self._device, self._stream.copy([]))

    def start_load_kv(self, metadata: "MooncakeStoreConnectorMetadata") -> None:
        """Let threads load what the step's requests wait for."""
        loads = [each for each in metadata.requests if each.load_spec is not None]
        if loads and not self._capacity_only:
            begin = self._after_steps()
            for each in loads:
                each.current_event = begin
        super().start_load_kv(metadata)

    def wait_for_save(self, metadata: "MooncakeStoreConnectorMetadata") -> None:
        """Let the thread store what the steps up to this one write."""
        stores = [each for each in metadata.requests if each.can_save]
        if not stores or self.kv_send_thread is None:
            return
        begin = self._after_steps()
        for each in stores:
            each.current_event = begin
            self.kv_send_thread.add_request(each)

    def close(self) -> None:
        """End the threads once their work is done, and the connection to the store."""
        threads = [*self.kv_recv_threads, *filter(None, [self.kv_send_thread])]
        server, self.lookup_server = self.lookup_server, None
        super().close()
        for thread in threads:
            thread.request_queue.put(EndOfThread())
        if server is not None:
            server.running = False  # it looks after each question
            path = worker.get_zmq_rpc_path_lookup(self._config)
            with make_zmq_socket(server.ctx, path, zmq.REQ, bind=False, linger=0) as socket:
                socket.send_multipart([LOOKUP_MSG, bytes(4), bytes(2), b""])
                server.thread.join(SECONDS_TO_END)
            server.close()
