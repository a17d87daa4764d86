"""Memory that sleeps, without an engine: what is kept, what is lost, and what fails half-way."""

import gc
import os
import resource
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.model_loader.reload.layerwise import (
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from tests.conftest import SEED
from vllm_npu_prep import ranks
from vllm_npu_prep.device import regions
from vllm_npu_prep.device.cpu import CPUDevice
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.runner.new_weights import kept_addresses
from vllm_npu_prep.sleep import TAGS, SleepingMemory
from vllm_npu_prep.worker import NPUWorker

WIDTH = 512  # a megabyte of float32


def resident():
    return psutil.Process().memory_info().rss


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.tied = self.weight
        self.scales = nn.Parameter(torch.randn(WIDTH, 3).t(), requires_grad=False)
        self.register_buffer("steps", torch.arange(WIDTH))
        self.derived = self.weight.detach() * 2
        self.absorbed = self.weight.detach()
        self.parts = [part.t() for part in self.weight.data.split(WIDTH // 2)]


@pytest.fixture
def memory():
    gc.freeze()  # who refers to weights is looked for among objects of this test only
    yield SleepingMemory(CPUDevice())
    gc.unfreeze()


def test_parameters_move_with_all_that_refers_to_them(memory):
    layer = Layer()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    strides = {name: tensor.stride() for name, tensor in layer.state_dict().items()}
    memory.adopt(layer)
    (region,) = memory._regions["weights"]
    begin, end = region.data.data_ptr(), region.data.data_ptr() + region.data.numel()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.stride() == strides[name]
        assert (begin <= tensor.data_ptr() < end) == (name != "steps")
    assert layer.tied is layer.weight
    assert layer.absorbed.data_ptr() == layer.weight.data_ptr()
    parts = layer.weight.split(WIDTH // 2)
    assert all(torch.equal(part, each.t()) for part, each in zip(parts, layer.parts, strict=True))
    assert [part.data_ptr() for part in parts] == [part.data_ptr() for part in layer.parts]
    assert not begin <= layer.derived.data_ptr() < end


def test_regions_close_before_they_pass_their_size(memory, monkeypatch):
    monkeypatch.setattr("vllm_npu_prep.sleep.REGION_BYTES", 2_500_000)
    memory.adopt(nn.Sequential(Layer(), Layer(), Layer()))  # of 1.05 MB each
    sizes = [region.data.numel() for region in memory._regions["weights"]]
    assert len(sizes) == 2 and max(sizes) <= 2_500_000


def test_a_weight_that_something_unknown_refers_to_stays_awake(memory):
    layer = Layer()
    other = layer.scales.detach()
    memory.adopt(layer)
    memory.suspend(level=2)
    assert torch.equal(layer.scales, other)
    assert other.any()
    assert not layer.weight.any()


def awake_with_a_cache(memory, nbytes):
    """A layer and a cache full of 7, both in regions, and the layer's weight."""
    layer = Layer()
    memory.adopt(layer)
    cache = memory.zeros(nbytes)
    cache.fill_(7)
    return layer, cache, layer.weight.clone()


def test_level_1_alone_keeps_weights_and_caches_are_zero(memory):
    layer, cache, before = awake_with_a_cache(memory, 8 << 20)
    awake = resident()
    memory.suspend(level=1)
    assert awake - resident() >= 8 << 20
    assert memory.state() == "SUSPENDED"
    memory.resume(["kv_cache"])
    assert memory.state() == "SUSPENDED"
    assert not cache.any()
    memory.resume()
    assert memory.state() == "RUNNING"
    assert torch.equal(layer.weight, before)
    memory.suspend(level=2)
    memory.resume()
    assert not layer.weight.any()


def test_what_a_drafter_has_for_itself_is_kept_at_level_2(memory):
    """What it shares with the model comes again with the model's new weights."""
    layer, drafter, own = Layer(), nn.Module(), torch.ones(WIDTH)
    drafter.shared, drafter.own = layer, nn.Parameter(own.clone(), requires_grad=False)
    memory.adopt(layer, drafter)
    assert own.nbytes <= memory.drafter_bytes < layer.weight.nbytes
    memory.suspend(level=2)
    assert not any(region.is_mapped for region in memory._regions["weights"])
    memory.resume()
    assert torch.equal(drafter.own, own)
    assert not layer.weight.any()


def test_a_wake_up_without_memory_keeps_what_slept(memory, monkeypatch):
    layers = [Layer(), Layer()]
    before = layers[0].weight.clone()
    monkeypatch.setattr("vllm_npu_prep.sleep.REGION_BYTES", 1 << 20)  # a region for each layer
    memory.adopt(*layers)
    memory.zeros(1 << 20)
    memory.suspend(level=1)
    have, room = psutil.virtual_memory(), iter([1 << 40, 0])
    with monkeypatch.context() as patched:
        patched.setattr(
            regions.psutil, "virtual_memory", lambda: have._replace(available=next(room))
        )
        with pytest.raises(PrepError, match=r"wake-up: no memory.*still asleep") as error:
            memory.resume()
    assert "\n" not in str(error.value)
    assert memory.state() == "SUSPENDED"
    assert not any(region.is_mapped for each in memory._regions.values() for region in each)
    memory.resume()
    assert all(torch.equal(layer.weight, before) for layer in layers)


@contextmanager
def largest_file(nbytes):
    """Files may not grow further, as on a disk that is nearly full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, WIDTH * WIDTH * 2], ids=["none", "for a part"])
def test_a_sleep_without_room_leaves_everything_awake(memory, room):
    layer, cache, before = awake_with_a_cache(memory, 1 << 20)
    with (
        largest_file(room),
        pytest.raises(PrepError, match=r"sleep: .* bytes of weights do not fit.*TMPDIR") as error,
    ):
        memory.suspend(level=1)
    assert "\n" not in str(error.value)
    assert memory.state() == "RUNNING"
    assert torch.equal(layer.weight, before)
    assert (cache == 7).all()


def test_a_sleep_without_room_leaves_a_released_cache_released(memory):
    layer, cache, before = awake_with_a_cache(memory, 1 << 20)
    memory.discard(("kv_cache",))
    with largest_file(0), pytest.raises(PrepError, match="do not fit"):
        memory.suspend(level=1)
    assert memory.state() == "SUSPENDED"
    assert torch.equal(layer.weight, before)
    assert [each.is_mapped for each in memory._regions["kv_cache"]] == [False]
    memory.resume(["kv_cache"])
    assert memory.state() == "RUNNING"
    assert not cache.any()


def test_a_rank_wakes_what_it_put_to_sleep_if_another_could_not(memory, monkeypatch):
    """Its weights alone: the cache had been released before."""
    layer, _, before = awake_with_a_cache(memory, 1 << 20)
    memory.discard(("kv_cache",))
    said = iter([None, "the other rank has no room"])  # when asked, and when asleep
    monkeypatch.setattr(ranks, "_first_of_ranks", lambda mine: next(said))
    worker = SimpleNamespace(
        sleep_mode_backend=memory,
        _prepare_sleep=lambda level: None,
        parallel_config=SimpleNamespace(world_size=2, rank=0),
        prep_device=CPUDevice(),
    )
    NPUWorker.sleep(worker, 1)  # the last rank raises, which this is not
    mapped = {tag: [each.is_mapped for each in memory._regions[tag]] for tag in TAGS}
    assert mapped == {"weights": [True], "kv_cache": [False]}
    assert torch.equal(layer.weight, before)
    assert memory.state() == "SUSPENDED"
    assert next(said, None) is None


def test_a_rank_sleeps_on_if_another_has_no_memory(memory, monkeypatch):
    awake_with_a_cache(memory, 1 << 20)
    memory.unmap(1)
    asleep = memory.state()
    monkeypatch.setattr(ranks, "_first_of_ranks", lambda mine: "the other rank has no room")
    parallel = SimpleNamespace(world_size=2, rank=0)
    NPUWorker.wake_up(SimpleNamespace(_sleeping=memory, parallel_config=parallel))
    assert not any(region.is_mapped for tag in TAGS for region in memory._regions[tag])
    assert memory.state() == asleep


@pytest.mark.parametrize("failure", ["an error", "the end of the file"])
def test_weights_that_cannot_be_read_back_sleep_on(memory, monkeypatch, failure):
    layer, _, before = awake_with_a_cache(memory, 1 << 20)
    memory.suspend(level=1)
    read, calls = os.readv, []

    def half(descriptor, buffers):
        calls.append(None)
        if len(calls) == 1:
            return read(descriptor, [buffers[0][: len(buffers[0]) // 2]])
        if failure == "an error":
            raise OSError(5, "Input/output error")
        return 0

    with monkeypatch.context() as patched:
        patched.setattr(regions.os, "readv", half)
        with pytest.raises(PrepError, match=r"wake-up: .* could not be read back.*still asleep"):
            memory.resume()
    assert memory.state() == "SUSPENDED"
    assert not layer.weight.any()
    memory.resume()
    assert torch.equal(layer.weight, before)


def test_an_unknown_tag_is_named(memory):
    with pytest.raises(PrepError, match=r"no tag \['weight'\]; there are weights, kv_cache"):
        memory.resume(["weight"])


OF_MODEL = SimpleNamespace(dtype=torch.float32)


def test_what_layers_derive_of_new_weights_keeps_its_address():
    layer = Layer()
    derived, parts, new = layer.derived, layer.parts, torch.ones(WIDTH, WIDTH)
    address = derived.data_ptr()
    with kept_addresses(layer, OF_MODEL):
        layer.weight.copy_(new)
        layer.derived = layer.weight * 2
        layer.parts = [part * 3 for part in layer.parts]
    assert layer.derived.data_ptr() == address
    assert (derived == 2).all()
    assert (parts[1] == 3).all()
    assert layer.parts is parts


def test_a_reload_that_fails_leaves_weights_where_they_were():
    """A layer has all its new weights or all its old ones, and what it derives follows."""
    model = nn.Module()
    model.done, model.begun = Layer(), Layer()
    record_metadata_for_reloading(model)
    places = {
        (name, kind): getattr(getattr(model, name), kind).data_ptr()
        for name in ("done", "begun")
        for kind in ("weight", "derived")
    }
    old = model.begun.weight.clone()
    told = pytest.raises(OSError, match="half")
    with told, kept_addresses(model, OF_MODEL):
        model.done.weight.fill_(1)
        model.done.derived = model.done.weight * 2
        initialize_layerwise_reload(model)
        assert model.begun.weight.is_meta
        raise OSError("half of the file")
    now = {(name, kind): getattr(getattr(model, name), kind).data_ptr() for name, kind in places}
    assert now == places
    assert (model.done.derived == 2).all()
    assert torch.equal(model.begun.weight, old)


class WithAdapters(BaseLayerWithLoRA):
    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer


def test_new_weights_find_layers_by_the_names_that_files_have():
    model = nn.Module()
    model.layer = wrapped = WithAdapters(Layer())
    with kept_addresses(model, OF_MODEL):
        assert "layer.weight" in dict(model.named_parameters())
    assert model.layer is wrapped


def test_new_weights_of_another_shape_are_refused():
    layer = Layer()
    told = pytest.raises(PrepError, match=r"derived of Layer was \(512, 512\).*start the engine")
    with told, kept_addresses(layer, OF_MODEL):
        layer.derived = layer.derived[:3]
