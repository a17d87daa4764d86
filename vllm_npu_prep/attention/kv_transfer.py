"""KV connectors of vLLM that read and write planes.

vLLM 0.32 passes connectors each layer's cache as ``[num_blocks, num_kv_heads, block_size, 2 *
head_size]``, with K and V of a head side by side, or a latent row and its rotated key; here these
are planes. What is stored outside of the engine keeps upstream's form. `vllm_npu_prep.startup` says
which connectors a kernel family takes, and the platform names this module as the place where vLLM
finds them (``kv_connector_module_path``).
"""

import copy
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file, save_file
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, example_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.attention.backend import AttentionMetadata

from vllm_npu_prep.attention.kernels.latent import Planes
from vllm_npu_prep.attention.kv_cache import planes_by_layer
from vllm_npu_prep.attention.offloading import OffloadingConnector, PlaneOffloadingSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["ExampleConnector", "OffloadingConnector", "PlaneOffloadingSpec"]

STORED = "kv_cache"
"""The name of the only tensor in a file."""


def read_slots(
    # K and V, or `Planes` of latent attention, each [num_blocks, block_size, heads, width]
    planes: Sequence[torch.Tensor],
    slots: torch.Tensor,  # int64 [num_tokens]
) -> torch.Tensor:
    """Return the contents of slots in the form in which they are stored.

    Returns
    -------
    torch.Tensor
        ``[num_tokens, heads, sum of widths]`` on the host, contiguous; for latent planes
        ``[num_tokens, sum of widths]``.
    """
    on_device = slots.to(planes[0].device)
    rows = torch.cat([plane.flatten(0, 1)[on_device] for plane in planes], dim=-1).cpu()
    return rows.squeeze(1) if isinstance(planes, Planes) else rows


def write_slots(planes: Sequence[torch.Tensor], slots: torch.Tensor, stored: torch.Tensor) -> None:
    """Write what `read_slots` returned, a tensor on the host, into slots of a cache."""
    on_device = slots.to(planes[0].device)
    rows = stored.to(on_device.device).view(len(slots), planes[0].shape[2], -1)
    for plane, part in zip(planes, rows.split([plane.shape[-1] for plane in planes], dim=-1)):
        plane.flatten(0, 1)[on_device] = part


@dataclass
class LayersOfRank(KVConnectorHandshakeMetadata):
    """The names of the layers that a rank stores and loads, for the scheduler's connector."""

    names: tuple[str, ...]


class ExampleConnector(example_connector.ExampleConnector):
    """vLLM's connector over a shared folder, with a file for each prompt and layer.

    Upstream's connector has faults that would end an engine or change tokens. They are avoided
    here:

    - Upstream stores only the first chunk of a prompt in chunks: start-up demands that chunked
      prefill is off.
    - For a request that comes back after preemption, upstream also looks for files of its output,
      which were never stored: here such a request is computed again.
    - Upstream looks for one token less than it stores, so that a prompt of whole blocks and one
      token is never found, or found under another prompt's name: here both count the same tokens.
    - Upstream takes a prompt as stored once its folder exists: here the complete file of each layer
      has to exist.
    - Upstream names files by layers: here also by tensor-parallel ranks, each of which has its own
      heads.
    - vLLM's scheduler knows only the layers of the first pipeline stage: here each rank reports its
      layers, so that a prompt counts as stored once all stages have stored it.
    - Upstream shares prompts whose ``cache_salt`` says that they must not be shared: here they are
      neither stored nor loaded.
    """

    def __init__(self, vllm_config: "VllmConfig", role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._layer_names = tuple(name for group in groups for name in group.layer_names)
        self._files_of_prompt: list[str] = []  # of all ranks, which report their layers
        self._salted: set[str] = set()  # ids of requests
        self._parts = vllm_config.parallel_config.tensor_parallel_size
        is_worker = role is KVConnectorRole.WORKER
        self._part = get_tensor_model_parallel_rank() if is_worker else None

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, example_connector.ExampleConnectorMetadata)
        for request in metadata.requests:
            if request.is_store:
                continue
            for layer_name, layer in forward_context.no_compile_layers.items():
                cache = getattr(layer, "kv_cache", None)
                if cache is not None:
                    stored = load_file(self._file(layer_name, request))[STORED]
                    write_slots(self._planes(layer_name, cache), request.slot_mapping, stored)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, example_connector.ExampleConnectorMetadata)
        for request in metadata.requests:
            if request.is_store:
                stored = read_slots(self._planes(layer_name, kv_layer), request.slot_mapping)
                path = self._file(layer_name, request)
                # Engines in containers that share the folder may share their process ids, too.
                unfinished = f"{path}.{uuid.uuid4().hex}"
                save_file({STORED: stored}, unfinished)
                os.replace(unfinished, path)

    def _planes(self, layer_name: str, cache: torch.Tensor) -> Sequence[torch.Tensor]:
        layers = self._vllm_config.compilation_config.static_forward_context
        return cast(
            "Sequence[torch.Tensor]", planes_by_layer({layer_name: cache}, layers)[layer_name]
        )

    def _file(self, layer_name: str, request: example_connector.ReqMeta) -> str:
        assert self._part is not None  # workers load and store
        name = self._name(layer_name, self._part)
        return self._generate_filename_debug(name, request.token_ids, request.mm_hashes)

    def _name(self, layer_name: str, part: int) -> str:
        """Return a file's name without its ending; with one rank it is the layer's name."""
        return layer_name if self._parts == 1 else f"{layer_name}.part{part}of{self._parts}"

    def get_handshake_metadata(self) -> LayersOfRank:
        return LayersOfRank(self._layer_names)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Set which files make up a prompt.

        The keys of `metadata` are a pipeline stage and a tensor-parallel rank.
        """
        layers = {rank: cast("LayersOfRank", each).names for rank, each in metadata.items()}
        self._files_of_prompt = [
            f"{self._name(name, part)}.safetensors"
            for (_, part), names in layers.items()
            for name in names
        ]

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.cache_salt:
            self._salted.add(request.request_id)
            return 0, False
        num_stored = self._num_stored(request.num_prompt_tokens)
        if request.num_preemptions or num_stored <= num_computed_tokens:
            return 0, False
        if not self._found_match_for_request(request):
            return 0, False
        return num_stored - num_computed_tokens, False

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        new_reqs = scheduler_output.scheduled_new_reqs
        shared = copy.copy(scheduler_output)
        shared.scheduled_new_reqs = [new for new in new_reqs if new.req_id not in self._salted]
        self._salted -= scheduler_output.finished_req_ids
        return super().build_connector_meta(shared)

    def _found_match_for_prompt(self, prompt_token_ids: list[int], mm_hashes: list[str]) -> bool:
        stored = torch.tensor(prompt_token_ids[: self._num_stored(len(prompt_token_ids))])
        folder = self._generate_foldername_debug(stored, mm_hashes)
        assert self._files_of_prompt  # ranks have told of their layers before the first request
        return all(os.path.exists(os.path.join(folder, name)) for name in self._files_of_prompt)

    def _num_stored(self, num_prompt_tokens: int) -> int:
        """Return the tokens in whole blocks, so that at least one token is left to compute."""
        return example_connector.align_to_block_size(num_prompt_tokens, self._block_size)
