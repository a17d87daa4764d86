"""K and V as planes of the bytes that vLLM plans, and what can't be planes."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_npu_prep.attention.kernels.latent import LatentShape
from vllm_npu_prep.attention.kv_cache import allocate_planes, single_planes, zero_blocks
from vllm_npu_prep.device.cpu import CPUDevice
from vllm_npu_prep.errors import PrepError

BLOCKS = 5
SHAPE = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


def config(*groups, layers=2, offsets=None, block_stride=None) -> KVCacheConfig:
    """Groups of `layers` layers each, overlaying each other unless offsets are given."""
    tensors, specs = [], []
    sizes = [spec.page_size_bytes * BLOCKS for spec in groups]
    offsets = offsets or [0] * len(groups)
    total = max(offset + size * layers for offset, size in zip(offsets, sizes))
    for index, (spec, size, offset) in enumerate(zip(groups, sizes, offsets)):
        names = [f"model.layers.{index * layers + i}.attn" for i in range(layers)]
        stride = block_stride or spec.page_size_bytes
        tensors.append(KVCacheTensor(total, names, size, stride, offset))
        specs.append(KVCacheGroupSpec(names, spec))
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=specs)


def test_layers_are_contiguous_planes_apart_from_each_other():
    caches = allocate_planes(config(FullAttentionSpec(**SHAPE)), CPUDevice())
    assert len(caches) == 2
    for value, cache in enumerate(caches.values(), 1):
        assert cache.shape == (2, BLOCKS, 4, 2, 8)
        assert cache[0].is_contiguous()
        assert cache[1].is_contiguous()
        assert not cache.any()
        cache.fill_(value)
    for value, cache in enumerate(caches.values(), 1):
        assert (cache == value).all()


def test_each_layer_has_a_buffer_of_its_own():
    """One operator over the whole cache would count tens of GB in 32 bits."""
    asked = []

    class Device(CPUDevice):
        def zeros(self, nbytes):
            asked.append(nbytes)
            return super().zeros(nbytes)

    spec = FullAttentionSpec(**SHAPE)
    allocate_planes(config(spec, layers=3), Device())
    assert asked == [spec.page_size_bytes * BLOCKS] * 3
    asked.clear()
    window = SlidingWindowSpec(**SHAPE, sliding_window=8)
    allocate_planes(config(spec, window), Device())
    assert len(asked) == 2, "groups that overlay each other share buffers"


def test_latent_rows_and_rotated_keys_are_planes_of_their_own():
    spec = MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1})
    caches = allocate_planes(config(spec), CPUDevice())
    shape = LatentShape(2, 6, 2, 4, 4, 1.0)
    layers = {name: SimpleNamespace(impl=SimpleNamespace(shape=shape)) for name in caches}
    planes = single_planes(caches.values(), caches, layers)
    assert len(planes) == 2 * len(caches)
    for value, plane in enumerate(planes, 1):
        assert plane.shape == (BLOCKS, 4, 1, (6, 2)[(value + 1) % 2]) and plane.is_contiguous()
        plane.fill_(value)
    zero_blocks(planes, [2])
    for value, plane in enumerate(planes, 1):
        assert not plane[2].any()
        assert (plane[[0, 1, 3, 4]] == value).all(), "planes don't overlap"


@pytest.mark.parametrize(
    "window",
    [
        SlidingWindowSpec(**SHAPE, sliding_window=8),
        ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=8),
    ],
)
def test_groups_in_one_region_agree_on_the_bytes_of_a_block(window):
    caches = allocate_planes(config(FullAttentionSpec(**SHAPE), window), CPUDevice())
    full, windowed = caches["model.layers.0.attn"], caches["model.layers.2.attn"]
    for one, other in zip(full, windowed):  # K and K, V and V
        assert one.data_ptr() == other.data_ptr()
        assert one.is_contiguous() and other.is_contiguous()
    assert full.data_ptr() != caches["model.layers.1.attn"].data_ptr()
    full[:, 3] = 7
    assert (windowed[:, 3] == 7).all()
    assert not windowed[:, [0, 1, 2, 4]].any()


def test_groups_that_split_bytes_differently_are_refused():
    wide = FullAttentionSpec(**{**SHAPE, "block_size": 8})
    # As many bytes in a page, but latent rows fill it alone
    latent = MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1, "head_size": 32})
    for other in (wide, latent):
        with pytest.raises(PrepError, match="other planes"):
            allocate_planes(config(FullAttentionSpec(**SHAPE), other), CPUDevice())


def test_blocks_interleaved_with_other_layers_are_refused():
    spec = FullAttentionSpec(**SHAPE)
    with pytest.raises(PrepError, match="layer-compact"):
        allocate_planes(config(spec, block_stride=2 * spec.page_size_bytes), CPUDevice())


def test_padded_pages_are_refused():
    spec = FullAttentionSpec(**SHAPE, page_size_padded=1024)
    with pytest.raises(PrepError, match="not K and V"):
        allocate_planes(config(spec), CPUDevice())
    spec = MLAAttentionSpec(**SHAPE, state_content_bytes=656)  # packed with scales
    with pytest.raises(PrepError, match="not latent rows"):
        allocate_planes(config(spec), CPUDevice())


def states(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> MambaSpec:
    """States of the convolution and of the rule, padded to the page of attention."""
    page = FullAttentionSpec(**SHAPE).page_size_bytes
    return MambaSpec(4, shapes, (torch.float16, dtype), page_size_padded=page)


def test_states_touch_their_own_blocks_of_a_shared_region():
    spec = states((3, 5), (2, 3, 2))
    plan = config(FullAttentionSpec(**SHAPE), spec, layers=1)
    attention, (conv, rule) = allocate_planes(plan, CPUDevice()).values()
    assert (conv.shape, rule.shape) == ((BLOCKS, 3, 5), (BLOCKS, 2, 3, 2))
    assert (conv.dtype, rule.dtype) == (torch.float16, torch.float32)
    assert all(part[1].is_contiguous() for part in (conv, rule))
    for block in range(BLOCKS):
        attention.zero_()
        conv[block], rule[block] = 1, 2
        touched = attention.flatten(2).any(-1)
        assert touched.any(0).tolist() == [each == block for each in range(BLOCKS)]
        assert touched[:, block].all(), "each part is in a plane of its own"
        assert (conv[block] == 1).all() and (rule[block] == 2).all(), "parts don't overlap"


@pytest.mark.parametrize("shapes", [((3, 5), (2, 3, 12)), ((3, 50), (2, 3, 2)), ((3, 5), ())])
def test_states_that_do_not_fit_into_half_a_page_are_refused(shapes):
    """256 bytes of half a page: 288 of the rule, or 300 of the convolution, or one part alone."""
    spec = states(*(shape for shape in shapes if shape))
    with pytest.raises(PrepError, match="do not fit into the halves"):
        allocate_planes(config(FullAttentionSpec(**SHAPE), spec, layers=1), CPUDevice())
