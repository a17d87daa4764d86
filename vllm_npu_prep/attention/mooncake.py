"""K and V that another engine computed, over Mooncake: vLLM's connector, for caches in planes.

One engine computes prompts (the producer), another one decodes them (the consumer). The consumer
tells the producer its blocks and the addresses of its memory, and the producer writes them there.
Requests, answers and the order of these are upstream's. What is registered and copied is planes:
each is a region of its own, whose blocks are contiguous.

A producer that stalls may go on to write after the consumer has given its request up. So blocks to
which it may still write are kept from others, until it has answered or is gone.

In a block of a plane, heads lie within tokens. So a rank that sends a part of its heads sends a
part of each token, where upstream's caches have one part of the block.
"""

import asyncio
import os
import queue
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import zmq.asyncio
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeXferMetadata,
    MooncakeXferResponse,
    PullReqMeta,
    TransferRegion,
)
from vllm.utils.network_utils import get_ip
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs

from vllm_npu_prep.attention.offloading import planes_by_block
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

DTYPE = " in "
"""Stands between a layer's name and the dtype of a plane."""

SECONDS_BETWEEN_LOOKS = 1.0
"""Time between two looks whether a producer that has not answered still lives."""

SECONDS_AFTER_TIMEOUT = 60
"""How much longer than ``VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`` upstream waits for an answer."""

SECONDS_BETWEEN_STEPS = 0.01
"""Time between steps that have no token while blocks are kept from others, which may be for hours:
an idle engine would else step 600 times a second."""

UNEQUAL_STATES = (
    "Recurrent states can't be divided among other ranks: the tensor-parallel size is {} where "
    "prompts are computed, and {} where they are decoded; give both engines the same"
)


class MooncakeConnector(mooncake_connector.MooncakeConnector):
    """vLLM's connector to another engine's memory, for planes."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        assert vllm_config.kv_transfer_config is not None
        assert vllm_config.kv_transfer_config.engine_id is not None
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        given = vllm_config, self.engine_id, kv_cache_config
        is_worker = role is KVConnectorRole.WORKER
        self._num_kept = 0  # blocks that ranks keep from others
        self.connector_scheduler = None if is_worker else PlaneScheduler(*given)
        self.connector_worker = PlaneWorker(*given) if is_worker else None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> None:
        """Ask for no layout: planes have theirs."""

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Take the pool of blocks, on the scheduler's side."""
        self._pool = gpu_block_pool

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        """Return what ranks have to send and receive; steps without a token take their time."""
        if self._num_kept and not scheduler_output.total_num_scheduled_tokens:
            time.sleep(SECONDS_BETWEEN_STEPS)
        return super().build_connector_meta(scheduler_output)

    def build_connector_worker_meta(self) -> "KeptBlocks | None":
        """Return which blocks the rank has begun to keep from others, or no longer keeps."""
        assert isinstance(self.connector_worker, PlaneWorker)
        return self.connector_worker.changes_of_kept()

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Keep blocks from others, or give them back, as ranks say.

        vLLM calls this before the requests that had the blocks let go of them.
        """
        changes = connector_output.kv_connector_worker_meta
        if isinstance(changes, KeptBlocks):
            self._pool.touch([self._pool.blocks[block] for block in changes.kept])
            self._pool.free_blocks([self._pool.blocks[block] for block in changes.released])
            self._num_kept += len(changes.kept) - len(changes.released)

    def has_pending_push_work(self) -> bool:
        """Tell whether ranks have to be asked even without requests: they still keep blocks.

        A pause, which may clear the prefix cache for new weights, waits for these blocks, too.
        """
        return self._num_kept > 0


@dataclass
class KeptBlocks(KVConnectorWorkerMetadata):
    """Blocks that ranks keep from others from now on, and those that they no longer do.

    A block is here once for each rank and transfer.
    """

    kept: list[int]
    released: list[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KeptBlocks":
        """Return what two ranks say."""
        assert isinstance(other, KeptBlocks)
        return KeptBlocks(self.kept + other.kept, self.released + other.released)


class PlaneScheduler(mooncake_connector.MooncakeConnectorScheduler):
    """Upstream's books of what is sent and received."""

    def __init__(
        self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        # A consumer computes a prompt's last token, whose window or chunk may begin a block before
        # that of the token after it. So it leaves that token out of what it asks for, as upstream
        # does beside recurrent states.
        self._bounded_replay |= any(
            not isinstance(spec, FullAttentionSpec)
            for group in kv_cache_config.kv_cache_groups
            for spec in iter_layer_specs(group.kv_cache_spec)
        )


class PlaneWorker(mooncake_connector.MooncakeConnectorWorker):
    """Sends and receives the planes of one rank.

    Raises
    ------
    PrepError
        If the transfer engine does not start, or the port of the bootstrap server is taken.
    """

    def __init__(
        self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig"
    ) -> None:
        assert vllm_config.kv_transfer_config is not None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        try:
            super().__init__(vllm_config, engine_id, kv_cache_config)
        except OSError as error:
            raise PrepError(
                f"Mooncake's bootstrap server can't have port {envs.VLLM_MOONCAKE_BOOTSTRAP_PORT} "
                f"({os.strerror(error.errno or 0)}); give each server of a host another one in "
                "VLLM_MOONCAKE_BOOTSTRAP_PORT"
            ) from error
        except RuntimeError as error:
            reason = str(error).rstrip(".")
            raise PrepError(
                f"Mooncake's transfer engine does not start on {get_ip()} with {extra}: {reason}; "
                "give a mooncake_protocol that this host has (tcp needs nothing), or VLLM_HOST_IP"
            ) from error
        self._failing: set[str] = set()  # requests that other ranks may still write to
        self._kept: queue.SimpleQueue[KeptBlocks] = queue.SimpleQueue()
        # Failures are told by request, and not by block: a request that is computed again gets new
        # blocks, as a stalled producer may still write to those that it had.
        self._is_hma_required = True
        self.async_zmq_ctx.term()
        self.async_zmq_ctx = PatientContext()

    def shutdown(self) -> None:
        """End threads and sockets, unless the worker never came to them."""
        if hasattr(self, "async_zmq_ctx"):
            super().shutdown()

    def _sync_block_size_with_kernel(self) -> None:
        """Keep vLLM's blocks, in which planes are registered, however kernels divide them."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register all planes, and let consumers ask for them.

        Each layer's planes are told to the other side in their order, by the layer's name and
        their dtype, which both sides must have in common.
        """
        config = self.kv_cache_config
        layers = self.vllm_config.compilation_config.static_forward_context
        memory: dict[int, int] = {}  # start of each allocation -> its bytes
        self.kv_caches_base_addr, self.block_len_per_layer = [], []
        self.registered_layer_names, self.registered_layer_indices = [], []
        self.registered_group_indices = []
        for name, group in config.transfer_group_index_by_layer.items():
            cache = kv_caches[name]
            dtypes = [plane.dtype for plane in cache]
            for plane, dtype in zip(
                planes_by_block(cache, layers[name], config.num_blocks), dtypes
            ):
                storage = plane.untyped_storage()
                memory[storage.data_ptr()] = storage.nbytes()
                self.kv_caches_base_addr.append(plane.data_ptr())
                self.block_len_per_layer.append(plane.shape[1])
                self.registered_layer_names.append(f"{name}{DTYPE}{dtype}")
                self.registered_layer_indices.append(mooncake_connector.extract_layer_index(name))
                self.registered_group_indices.append(group)
        self.kv_block_len_per_layer = self.block_len_per_layer
        self.region_shared_groups = [(group,) for group in self.registered_group_indices]
        self.region_row_offsets = [-1] * len(self.kv_caches_base_addr)
        self.seen_base_addresses = list(memory)
        self.device_kv_caches = kv_caches
        if self.engine.batch_register_memory(list(memory), list(memory.values())) != 0:
            raise RuntimeError("Mooncake batch memory registration failed.")
        if not self.is_kv_consumer:
            self._listen()

    def _listen(self) -> None:
        """Wait until this producer is known to its bootstrap server and listens to consumers."""
        ready = threading.Event()
        listener = asyncio.run_coroutine_threadsafe(
            self._mooncake_sender_listener(ready), self.sender_loop
        )
        listener.add_done_callback(lambda _: ready.set())  # it ends only if it fails
        ready.wait()
        if listener.done():
            listener.result()

    def _prepare_transfer_regions(
        self, meta: MooncakeXferMetadata
    ) -> tuple[list[TransferRegion], list[TransferRegion], str | None]:
        """Return this side's regions and the other's, pair by pair, and what is wrong with them.

        Where ranks of both sides have unequal heads, a region of a plane is divided into one for
        each token of a block, in which the heads to send are contiguous.
        """
        local, remote, error = super()._prepare_transfer_regions(meta)
        heads = self.transfer_topo.total_num_kv_heads
        sizes = self.tp_size, meta.remote_tp_size
        if error is not None or self.use_mla or min(heads, sizes[0]) == min(heads, sizes[1]):
            return local, remote, error
        if self.kv_cache_config.has_mamba_layers:
            return [], [], UNEQUAL_STATES.format(*sizes)
        return self._by_token(local), self._by_token(remote), None

    def _by_token(self, regions: list[TransferRegion]) -> list[TransferRegion]:
        parts = []
        for region in regions:
            spec = self._layer_specs[region.layer_name.partition(DTYPE)[0]]
            nbytes = region.kv_block_len // spec.block_size
            parts += [
                replace(region, base_addr=region.base_addr + token * nbytes, kv_block_len=nbytes)
                for token in range(spec.block_size)
            ]
        return parts

    def _validate_head_resharding_layout(self, *_: Any) -> None:
        """Find nothing wrong: planes are neither padded nor quantised."""

    # ----------------------------------------------------------------- failures

    async def receive_kv_from_single_worker(
        self, worker_addr: str, pull_metas: dict[str, PullReqMeta]
    ) -> None:
        """Ask a rank of the producer for blocks, until it has answered or is gone.

        Requests are given up after a timeout; their blocks are kept from others for longer, if
        need be. Upstream waits until its timeout for a producer that has died, gives up requests
        that the rank has already served, gives blocks to others though the rank may write to them,
        and waits for ever if the rank forgot a request, which it does after a timeout.
        """
        unanswered = Unanswered(pull_metas)
        kept: list[int] = []
        pull = asyncio.ensure_future(super().receive_kv_from_single_worker(worker_addr, unanswered))
        reason = f"{worker_addr} had given it up"
        seconds = envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT + SECONDS_AFTER_TIMEOUT
        end = time.monotonic() + seconds
        while not (await asyncio.wait([pull], timeout=SECONDS_BETWEEN_LOOKS))[0]:
            if await _is_gone(worker_addr):
                # What it had sent arrives before its blocks are given to others.
                await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
                reason = f"{worker_addr} is gone"
                pull.cancel()
            elif unanswered and time.monotonic() > end:
                kept = unanswered.blocks()
                self._kept.put(KeptBlocks(kept, []))
                late = f"{worker_addr} has not answered for {seconds} s; until it does, or is gone,"
                late += f" nobody else gets {counted(len(kept), 'block')}"
                self._handle_failed_recv(unanswered, list(unanswered), late)
        self._handle_failed_recv(unanswered, list(unanswered), reason)
        if kept:
            self._kept.put(KeptBlocks([], kept))

    def changes_of_kept(self) -> KeptBlocks | None:
        """Return what has changed since the last call of the blocks that are kept from others."""
        changes = KeptBlocks([], [])
        while not self._kept.empty():
            changes = changes.aggregate(self._kept.get())
        return changes if changes.kept or changes.released else None

    def process_pulling_result(
        self, response: MooncakeXferResponse, pull_metas: dict[str, PullReqMeta]
    ) -> None:
        """Count what a rank has sent or could not send; `pull_metas` keeps the others."""
        ok_reqs = response.ok_reqs or []
        failed = [req_id for req_id in ok_reqs if req_id in self._failing]
        self._handle_failed_recv(pull_metas, failed, "another rank could not send its part")
        response.ok_reqs = [req_id for req_id in ok_reqs if req_id in pull_metas]
        super().process_pulling_result(response, pull_metas)
        for req_id in response.ok_reqs:
            pull_metas.pop(req_id, None)  # which vLLM 0.33.0 does itself

    def _handle_failed_recv(
        self, pull_metas: dict[str, PullReqMeta], req_ids: Collection[str], reason: str
    ) -> None:
        """Report requests whose blocks did not arrive, once no rank writes to them any more."""
        given_up = {}
        for req_id in req_ids:
            meta = pull_metas.pop(req_id, None)
            if meta is None:
                continue
            self._failing.add(req_id)
            meta.pull_tasks_count -= 1
            if meta.pull_tasks_count <= 0:
                self._failing.discard(req_id)
                given_up[req_id] = meta
        super()._handle_failed_recv(given_up, list(given_up), reason)


class Unanswered(dict[str, PullReqMeta]):
    """The requests that a rank has not answered yet."""

    def copy(self) -> "Unanswered":
        """Return the same ones: vLLM 0.33.0 notes answers in a copy."""
        return self

    def blocks(self) -> list[int]:
        """Return the blocks to which the rank may still write."""
        return [
            block for meta in self.values() for group in meta.local_block_ids for block in group
        ]


class PatientSocket(zmq.asyncio.Socket):
    """A socket that waits for as long as it takes: a late producer says when it stops writing."""

    def setsockopt(self, option: int, value: Any) -> None:
        """Set an option, but no limit of time, which upstream sets."""
        if option != zmq.RCVTIMEO:
            super().setsockopt(option, value)


class PatientContext(zmq.asyncio.Context):
    """A context that makes such sockets."""

    _socket_class = PatientSocket


async def _is_gone(address: str) -> bool:
    """Tell whether nobody listens at ``tcp://HOST:PORT``, on a host that says so."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    opened = asyncio.open_connection(host.strip("[]"), int(port))
    try:
        _, writer = await asyncio.wait_for(opened, SECONDS_BETWEEN_LOOKS)
    except ConnectionRefusedError:
        return True
    except OSError:  # of the network: it may come back
        return False
    writer.close()
    return False
