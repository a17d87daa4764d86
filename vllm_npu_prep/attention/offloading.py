"""KV offloading: blocks of K and V in host memory (``--kv-offloading-size``), for caches in planes.

vLLM's scheduler decides which blocks the host keeps and when they come back; a step's loads and
stores arrive as jobs. Upstream's worker copies pages that hold K and V together, with CUDA streams.
Here each plane has its own host memory, and blocks that are neighbours on both sides are copied at
once, on two streams beside the one that computes: one for loads and one for stores.

The order follows from upstream's rules and from events:

- A job begins after all work issued before it. So a store reads what the steps wrote, and a load
  comes after its blocks were zeroed or read.
- A request whose blocks are loaded is scheduled once the load's event has happened.
- A block that is being stored is given to another request only after `wait`, which upstream calls
  before it does so.

So no step waits for a copy, on the host or on the device.
"""

import copy
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.logger import init_logger
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from vllm_npu_prep.attention.kernels.latent import planes_of
from vllm_npu_prep.device import Transfer, copy_stream, free_memory, host_bytes, host_memory
from vllm_npu_prep.errors import PrepError

logger = init_logger(f"vllm.{__name__}")

NEVER = 1 << 62
"""A number of tokens that no request reaches."""
CPU_BYTES = "cpu_bytes_to_use"
"""The key in upstream's configuration of the bytes of host memory, of all ranks together."""


def rows_of_blocks(part: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return the memory of one plane as int8 ``[num_blocks, bytes of a block]``.

    `part` is ``[num_blocks * n, ...]``: a plane, in blocks as kernels count them, or a part of the
    recurrent states. `num_blocks` counts blocks as vLLM does.
    """
    itemsize = part.element_size()
    nbytes = part.stride(0) * (len(part) // num_blocks) * itemsize
    whole = torch.empty(0, dtype=torch.int8, device=part.device)
    begin = part.storage_offset() * itemsize
    return whole.set_(part.untyped_storage(), begin, (num_blocks, nbytes), (nbytes, 1))


def planes_by_block(cache: Any, layer: Any, num_blocks: int) -> list[torch.Tensor]:
    """Return the planes of a layer's cache in the form of `rows_of_blocks`.

    `cache` is what `vllm_npu_prep.attention.kv_cache.allocate_planes` made; the shape of `layer`
    says where latent planes begin.
    """
    is_latent = isinstance(cache, torch.Tensor) and cache.dim() == 2
    parts = planes_of(cache, layer.impl.shape) if is_latent else cache
    return [rows_of_blocks(part, num_blocks) for part in parts]


class OffloadingConnector(offloading_connector.OffloadingConnector):
    """vLLM's connector to host memory, whose worker gets planes.

    Upstream's scheduler side looks at each request in each step, though a request that generates
    has something to store once in a chunk of blocks, or never: by default the host keeps prompts
    alone. Here it gets to see those for which something may have changed.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._due: dict[str, int] = {}  # by request the tokens with which it may have more to store

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        seen = self._with_news(scheduler_output)
        metadata = super().build_connector_meta(seen)
        for req_id in scheduler_output.finished_req_ids:
            self._due.pop(req_id, None)
        for req_id in seen.num_scheduled_tokens:
            self._due[req_id] = self._next_due(req_id)
        return metadata

    def reset_cache(self) -> bool | None:
        self._due.clear()  # all is stored again
        return super().reset_cache()

    def _with_news(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return a step without the requests that generate, got no block and have nothing due."""
        due, cached, scheduled = self._due, step.scheduled_cached_reqs, step.num_scheduled_tokens
        quiet = {
            req_id
            for req_id, blocks, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
            )
            if blocks is None and computed + scheduled[req_id] < due.get(req_id, 0)
        }
        if not quiet:
            return step
        seen, of_seen = copy.copy(step), CachedRequestData.make_empty()
        of_seen.resumed_req_ids = cached.resumed_req_ids
        for index, req_id in enumerate(cached.req_ids):
            if req_id not in quiet:
                of_seen.req_ids.append(req_id)
                of_seen.new_block_ids.append(cached.new_block_ids[index])
        seen.scheduled_cached_reqs = of_seen
        seen.num_scheduled_tokens = {
            req_id: tokens for req_id, tokens in scheduled.items() if req_id not in quiet
        }
        return seen

    def _next_due(self, req_id: str) -> int:
        """Return the tokens with which the next chunk of a request is full in any group.

        It is what ``OffloadingConnectorScheduler._build_store_jobs`` stores at the earliest, and
        what ``_calc_num_offloadable_tokens`` lets it.
        """
        side = self.scheduler
        state = side._req_status.get(req_id)
        if state is None:
            return 0
        due = min(
            (of_group.next_stored_chunk_idx + 1) * group.tokens_per_chunk
            for group, of_group in zip(
                side.config.kv_group_configs, state.group_states, strict=True
            )
        )
        most = side._calc_num_offloadable_tokens(state, NEVER)
        return due if due <= most or most == state.req.num_tokens else NEVER

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Pass all planes to the worker, each once, with the groups whose blocks it holds."""
        assert self.connector_worker is not None
        config, layers = self._kv_cache_config, self._layers()
        places: dict[int, int] = {}  # address of a plane -> its index
        planes: list[torch.Tensor] = []
        groups: list[list[CanonicalKVCacheRef]] = []
        for group_id in get_offloading_group_ids(config):
            of_group: dict[int, CanonicalKVCacheRef] = {}
            for name in config.kv_cache_groups[group_id].layer_names:
                for plane in planes_by_block(kv_caches[name], layers[name], config.num_blocks):
                    index = places.setdefault(plane.data_ptr(), len(planes))
                    if index == len(planes):
                        planes.append(plane)
                    of_group[index] = CanonicalKVCacheRef(index, plane.shape[1])
            groups.append(list(of_group.values()))
        tensors = [CanonicalKVCacheTensor(plane, plane.shape[1]) for plane in planes]
        self.connector_worker._init_worker(CanonicalKVCaches(tensors, groups))

    def _layers(self) -> Mapping[str, Any]:
        return self._vllm_config.compilation_config.static_forward_context


class PlaneOffloadingSpec(CPUOffloadingSpec):
    """The parts of vLLM's offloading: upstream's accounting of host blocks, this plugin's copies.

    Raises
    ------
    PrepError
        If the host memory that was asked for is too small for one block.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if not self.num_chunks and config.worker_kv_bytes_per_block:
            raise PrepError(
                f"--kv-offloading-size: {int(self.extra_config[CPU_BYTES]):,} bytes hold no block "
                f"of {self.kv_bytes_per_chunk:,} bytes (of all ranks together): give more"
            )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the worker of this rank, with its host memory.

        Raises
        ------
        PrepError
            If the host has less free memory than this rank's part.
        """
        made = PlaneOffloadingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        logger.info(
            "KV offloading: %s bytes of host memory for %d blocks of %d planes.",
            f"{made.nbytes:,}",
            self.num_chunks * self.blocks_per_chunk,
            len(kv_caches.tensors),
        )
        return made


class _Direction:
    """The jobs of one direction, loads or stores, in order and on their own stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = copy_stream(device)
        self._jobs: deque[tuple[TransferResult, Transfer, float]] = deque()  # and when it began

    def begin(self, job_id: int, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        result = TransferResult(job_id, True, sum(target.nbytes for target, _ in pairs))
        self._jobs.append((result, self._stream.copy(pairs), time.monotonic()))

    def finished(self) -> Iterator[TransferResult]:
        """Yield the jobs that have ended since the last call, in order.

        Their times, for vLLM's metrics, are from when they were issued until now, because asking a
        device's events for more would wait.
        """
        while self._jobs and self._jobs[0][1].query():
            result, _, begin = self._jobs.popleft()
            result.transfer_time = time.monotonic() - begin
            yield result

    def wait(self, job_ids: set[int] | None = None) -> None:
        """Wait on the host for these jobs, or for all if None."""
        for result, transfer, _ in self._jobs:
            if job_ids is None or result.job_id in job_ids:
                transfer.synchronize()


class PlaneOffloadingWorker(OffloadingWorker):
    """Copies blocks of one rank's planes between the device and the host.

    The host keeps `num_chunks` chunks, each of `blocks_per_chunk` blocks of the device. `nbytes` is
    the host memory that they take.

    Raises
    ------
    PrepError
        If the host has less free memory than that.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, num_chunks: int
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._planes = [each.tensor for each in kv_caches.tensors]  # int8 [num_blocks, bytes]
        self._groups = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]
        num_rows = num_chunks * blocks_per_chunk
        self.nbytes = num_rows * sum(plane.shape[1] for plane in self._planes)
        device = self._planes[0].device
        rows = [num_rows * plane.shape[1] for plane in self._planes]
        taken = sum(host_bytes(device.type, nbytes) for nbytes in rows)
        if taken > free_memory():
            raise PrepError(
                f"--kv-offloading-size: this rank's part takes {taken:,} bytes of host memory, "
                f"of which {free_memory():,} are free: give less"
            )
        self._host = [  # int8 [num_chunks * blocks_per_chunk, bytes], for each plane
            host_memory(device.type, nbytes).view(num_rows, -1) for nbytes in rows
        ]
        self._loads, self._stores = _Direction(device), _Direction(device)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        pairs = [(host, plane) for plane, host in self._neighbours(src_spec, dst_spec)]
        self._stores.begin(job_id, pairs)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Begin to copy blocks to the device. Loads wait for no stores, so all are expedited."""
        del expedited  # new in vLLM 0.33.0
        self._loads.begin(job_id, list(self._neighbours(dst_spec, src_spec)))
        return True

    def get_finished(self) -> list[TransferResult]:
        return [*self._stores.finished(), *self._loads.finished()]

    def wait(self, job_ids: set[int]) -> None:
        """Wait on the host for jobs whose blocks are about to be given to other requests."""
        self._stores.wait(job_ids)
        self._loads.wait(job_ids)

    def shutdown(self) -> None:
        self._stores.wait()
        self._loads.wait()
        self._host.clear()

    def _neighbours(
        self, device: GPULoadStoreSpec, host: LoadStoreSpec
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield rows of a plane and of its host memory, as many together as are neighbours in both.

        A request's first block may lie within a chunk, whose earlier blocks are then left out.
        """
        assert isinstance(host, BlockIDsLoadStoreSpec)
        size = self._blocks_per_chunk
        block_begin = chunk_begin = 0
        for planes, count, first in zip(self._groups, device.group_sizes, device.block_indices):
            if count == 0:
                continue
            skipped = first % size
            block_end = block_begin + count
            chunk_end = chunk_begin - (-(skipped + count) // size)
            blocks = device.block_ids[block_begin:block_end].astype(np.int64)
            chunks = host.block_ids[chunk_begin:chunk_end].astype(np.int64)
            rows = (chunks[:, None] * size + np.arange(size)).ravel()[skipped : skipped + count]
            block_begin, chunk_begin = block_end, chunk_end
            breaks = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(rows) != 1)) + 1
            for part in np.split(np.arange(count), breaks):
                block, row, length = int(blocks[part[0]]), int(rows[part[0]]), len(part)
                for index in planes:
                    yield (
                        self._planes[index][block : block + length],
                        self._host[index][row : row + length],
                    )
