"""Chunked local attention on the device: block tables of virtual requests, gathered in one launch.

vLLM's ``ChunkedLocalAttention`` wraps the backend: its builder splits a step's common metadata on
the host, makes copies of its own, and allows no full graph. Here the prepared step already has its
virtual requests (`vllm_npu_prep.prep.local_attention`), and the spec has the chunk size.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.worker.utils import AttentionGroup

from vllm_npu_prep.device import Device
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.local_attention import NO_LOCAL_GROUPS, LocalGroups


def unwrap_backends(layers: Iterable[Any], backend: type[AttentionBackend]) -> None:
    """Give layers with chunked local attention `backend` instead of vLLM's subclass of it."""
    for layer in layers:
        chunk_size = getattr(layer, "attention_chunk_size", None)
        if chunk_size is not None:
            layer.attn_backend, layer.impl.attention_chunk_size = backend, chunk_size


def find_local_groups(attn_groups: Sequence[Sequence[AttentionGroup]]) -> LocalGroups:
    """Return the KV-cache groups with chunked local attention.

    Raises
    ------
    PrepError
        If chunks are not whole blocks, or differ between layers.
    """
    found: dict[int, tuple[int, int]] = {}
    for group, parts in enumerate(attn_groups):
        for part in parts:
            spec = part.kv_cache_spec
            chunk_size = getattr(spec, "attention_chunk_size", None)
            if chunk_size is not None:
                found[group] = chunk_size, spec.block_size
    if not found:
        return NO_LOCAL_GROUPS
    sizes = set(found.values())
    chunk_size, block_size = sizes.pop()
    if sizes or chunk_size % block_size:
        raise PrepError(
            f"attention chunks of {chunk_size} tokens in blocks of {block_size}: chunks must "
            "consist of whole blocks, all of one size; use another --block-size"
        )
    return LocalGroups(chunk_size, chunk_size // block_size, tuple(found))


class LocalBlockTables:
    """The block tables of the virtual requests of each step, at one address for each layout.

    `entries`, int32, are the device's block tables of all groups, one after the other; their rows
    are whole attention chunks. A step has at most `max_num_reqs` virtual requests.
    """

    def __init__(
        self, device: Device, entries: torch.Tensor, local: LocalGroups, max_num_reqs: int
    ) -> None:
        self.local = local
        num_rows = len(local.groups) * max_num_reqs
        # It is changed in place in every step, so it must not be an inference tensor.
        with torch.inference_mode(False):
            self._gathered = torch.zeros(
                num_rows, local.blocks_per_chunk, dtype=torch.int32, device=entries.device
            )
        self._chunks = device.native(entries.view(-1, local.blocks_per_chunk))
        self._device = device

    def gather(self, table_rows: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the block tables of a step's virtual requests, padding included, by cache group.

        They are int32 ``[V, blocks_per_chunk]``, gathered in one launch and overwritten by the next
        step. `table_rows` are the step's ``chunk_local_table_rows`` on the device.
        """
        device, table_rows = self._device, table_rows.view(-1)
        gathered = self._gathered[: len(table_rows)]
        device.gather(device.native(gathered), self._chunks, device.native(table_rows))
        return dict(zip(self.local.groups, gathered.chunk(len(self.local.groups))))
