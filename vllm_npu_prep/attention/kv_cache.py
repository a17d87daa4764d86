"""The KV cache: two contiguous planes per layer, for K and V or for latent rows and rotated keys.

A layer's cache is ``(2, num_blocks, block_size, num_kv_heads, head_size)``, because Ascend kernels
take K and V each as a contiguous ``(num_blocks, block_size, ...)``. The planes of latent attention
have different widths, which no single tensor can have. Its cache is ``(num_blocks, page)``, whose
memory is one plane after the other (`vllm_npu_prep.attention.kernels.latent.planes_of`). vLLM plans
the bytes (which layers, how many blocks, where in the one allocation) and interleaves K and V
within a block; here the same bytes are viewed as planes.

Layers with recurrent states share memory with attention layers: a block belongs to one group at a
time, and has a row of half a page in each plane. A state has two parts. The recurrence's part is at
the beginning of the block's row in the first plane, and the convolution's in the second, so that a
state touches no bytes of another block.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.utils import AttentionGroup

from vllm_npu_prep.attention.kernels.latent import planes_of
from vllm_npu_prep.attention.state_pages import state_bytes
from vllm_npu_prep.device import Memory
from vllm_npu_prep.errors import PrepError

PLANE_SPECS = {
    FullAttentionSpec: 2,
    SlidingWindowSpec: 2,
    ChunkedLocalAttentionSpec: 2,
    MLAAttentionSpec: 1,
}
"""The supported kinds of KV cache. The number says how many times a page has ``head_size`` elements
of each token: twice for K and V, once for a latent row together with its rotated key."""

WINDOWS = ("sliding_window", "attention_chunk_size")
"""The attributes of layers and specs that limit how far attention looks back."""


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyGroupSpec(EncoderOnlyAttentionSpec):
    """Encoder-only layers with one window size; upstream's spec mixes all windows in one group."""

    # Tokens see each other up to sliding_window - 1 positions away; None for no limit
    sliding_window: int | None = None


def encoder_only_groups(vllm_config: VllmConfig, dtype: torch.dtype) -> list[KVCacheGroupSpec]:
    """Return the model's encoder-only layers, one group per window, without cache or block tables.

    The model has to be built already. `dtype` is that of K and V.
    """
    groups: dict[EncoderOnlyGroupSpec, list[str]] = {}
    for layer_name, layer in get_layers_from_vllm_config(vllm_config, Attention).items():
        if layer.attn_type == AttentionType.ENCODER_ONLY:
            spec = EncoderOnlyGroupSpec(
                block_size=vllm_config.cache_config.block_size,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                dtype=dtype,
                sliding_window=layer.sliding_window,
            )
            groups.setdefault(spec, []).append(layer_name)
    return [KVCacheGroupSpec(layer_names, spec) for spec, layer_names in groups.items()]


def split_by_window(
    groups: list[AttentionGroup], layers: Mapping[str, Any]
) -> list[AttentionGroup]:
    """Split groups so that all layers of a group have the same window or attention chunk size.

    Without the hybrid KV-cache manager, vLLM gives layers with windows or chunks full caches, in
    one group with full attention, and the group's spec has the window of only some of its layers.
    """
    split: list[AttentionGroup] = []
    for group in groups:
        by_window: dict[tuple[int | None, ...], list[str]] = {}
        for name in group.layer_names:
            windows = tuple(getattr(layers[name], kind, None) for kind in WINDOWS)
            by_window.setdefault(windows, []).append(name)
        for windows, layer_names in by_window.items():
            spec = group.kv_cache_spec
            known: dict[str, Any] = {
                kind: size for kind, size in zip(WINDOWS, windows) if hasattr(spec, kind)
            }
            spec = replace(spec, **known)
            split.append(replace(group, layer_names=layer_names, kv_cache_spec=spec))
    return split


def allocate_planes(
    config: KVCacheConfig,
    # Allocates the buffers: from the device, or from a pool that sleep mode can release
    memory: Memory,
    # Returns how many blocks attention kernels see in a block of a size (`attention.kernel_blocks`)
    kernel_blocks_of: Callable[[int], int] = lambda block_size: 1,
) -> dict[str, Any]:
    """Allocate the cache that `config` plans, with one buffer per layer, viewed as planes.

    vLLM plans one region of tens of GB. An operator over that many elements, such as the one that
    zeroes them, may count them in 32 bits, and nothing needs the layers to be neighbours. Layers
    that share a region, as groups of the hybrid cache do, share a buffer.

    Returns
    -------
    dict
        For each layer name, ``(2, num_blocks, block_size, num_kv_heads, head_size)``, and 1 in
        place of 2 for an indexer's keys; for latent attention ``(num_blocks, page)``; for recurrent
        states both parts of the states of all blocks.

    Raises
    ------
    PrepError
        If a layer's cache can't be equal planes, or if layers that share bytes would split them
        differently.
    """
    if not config.kv_cache_tensors:
        return {}
    caches: dict[str, Any] = {}
    regions: dict[int, tuple[int, int]] = {}  # start of a region of the plan: its end, its planes
    buffers: dict[int, torch.Tensor] = {}  # by start of the region
    for tensor in config.kv_cache_tensors:
        for index, layer_name in enumerate(tensor.layers):
            spec = _plane_spec(layer_name, _layer_spec(config, layer_name))
            start = tensor.offset + index * tensor.layer_stride
            size = config.num_blocks * spec.page_size_bytes
            if tensor.block_stride != spec.page_size_bytes:
                raise PrepError(
                    f"the KV cache of {layer_name} is interleaved with other layers (block stride "
                    f"{tensor.block_stride}, page {spec.page_size_bytes}); planes need a layer-"
                    "compact layout: unset VLLM_KV_CACHE_LAYOUT"
                )
            planes = 2 if isinstance(spec, MambaSpec) else PLANE_SPECS[type(spec)]
            if any(
                start < other_end
                and other < start + size
                and (other, other_end, other_planes) != (start, start + size, planes)
                for other, (other_end, other_planes) in regions.items()
            ):
                raise PrepError(
                    f"{layer_name} shares bytes with layers that split them into other planes "
                    "(pages of different sizes, or latent rows beside K and V); use a model whose "
                    "layers have caches of one kind"
                )
            if start not in regions:
                regions[start], buffers[start] = (start + size, planes), memory.zeros(size)
            if isinstance(spec, MambaSpec):
                caches[layer_name] = _states_of(layer_name, spec, buffers[start])
                continue
            cache = buffers[start].view(spec.dtype)
            if holds_latent_rows(spec):
                caches[layer_name] = cache.view(config.num_blocks, -1)
                continue
            count = kernel_blocks_of(spec.block_size)
            blocks = config.num_blocks * count, spec.block_size // count
            caches[layer_name] = cache.view(planes, *blocks, spec.num_kv_heads, spec.head_size)
    return caches


def holds_latent_rows(spec: KVCacheSpec) -> bool:
    """Whether a cache has two planes of different widths; the keys of an indexer have one plane."""
    return isinstance(spec, MLAAttentionSpec) and spec.cache_role is not SparseCacheRole.INDEXER


def _layer_spec(config: KVCacheConfig, layer_name: str) -> KVCacheSpec:
    for group in config.kv_cache_groups:
        if layer_name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                return spec.kv_cache_specs[layer_name]
            return spec
    raise AssertionError(f"{layer_name} belongs to no KV-cache group")


def _states_of(
    layer_name: str, spec: MambaSpec, buffer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the convolution's part and the recurrence's part of the states of all blocks."""
    sizes, half = state_bytes(spec), spec.page_size_bytes // 2
    if len(sizes) != 2 or max(sizes) > half or spec.page_size_bytes % 2:
        raise PrepError(
            f"{layer_name}: parts of a recurrent state of {sizes} bytes do not fit into the "
            f"halves of a page of {spec.page_size_bytes} bytes; use another model"
        )
    first, second = buffer.view(2, -1, half)
    rows = zip((second, first), sizes, spec.dtypes, spec.shapes)
    conv, rule = (
        plane[:, :size].view(dtype).unflatten(1, shape) for plane, size, dtype, shape in rows
    )
    return conv, rule


def _plane_spec(layer_name: str, spec: KVCacheSpec) -> AttentionSpec | MambaSpec:
    if isinstance(spec, MambaSpec):
        return spec
    if type(spec) not in PLANE_SPECS:
        allowed = ", ".join(each.__name__ for each in PLANE_SPECS)
        raise PrepError(
            f"{layer_name} has a {type(spec).__name__}: {allowed} are supported; use another model"
        )
    assert isinstance(spec, AttentionSpec)
    plane = spec.block_size * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    planes = PLANE_SPECS[type(spec)]
    if spec.page_size_bytes != planes * plane:
        what = "K and V" if planes == 2 else "latent rows"
        raise PrepError(
            f"{layer_name}: a page of {spec.page_size_bytes} bytes is not {what} of {plane} bytes "
            "each (padded and quantised caches are not supported); use a cache of the model's dtype"
        )
    return spec


def single_planes(
    kv_caches: Iterable[Any], caches: Mapping[str, Any], layers: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the planes of all layers; each row of a plane's first dimension is a block.

    `kv_caches` are in the order of layers; `caches` and `layers` have caches and layers by name.
    """
    shapes: dict[int, Any] = {
        id(cache): getattr(getattr(layers[name], "impl", None), "shape", None)
        for name, cache in caches.items()
    }
    return [
        plane
        for cache in kv_caches
        for plane in (
            cache
            if isinstance(cache, tuple) or cache.dim() > 2
            else planes_of(cache, shapes[id(cache)])
        )
    ]


def planes_by_layer(caches: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return caches as a KV connector needs them to find blocks: latent layers as two planes."""
    return {
        name: planes_of(cache, layers[name].impl.shape)
        if isinstance(cache, torch.Tensor) and cache.dim() == 2
        else cache
        for name, cache in caches.items()
    }


def zero_new_blocks(planes: Sequence[torch.Tensor], block_ids: list[int]) -> None:
    """Zero newly allocated blocks in every plane, if the planes have several dtypes.

    With one dtype, what another layer left in a block are numbers, and nobody reads them: an empty
    recurrent state is not read, and attention ends at a request's last token. Each row of a plane
    is a block.
    """
    if len({plane.dtype for plane in planes}) > 1:
        zero_blocks(planes, block_ids)


def zero_blocks(planes: Iterable[torch.Tensor], block_ids: list[int]) -> None:
    for plane in planes:
        plane[block_ids] = 0
