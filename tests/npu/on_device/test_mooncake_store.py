"""A pool of K and V on the device: a thread reads and writes the cache beside steps.

The store is a stand-in of this process. It copies by CANN's runtime, for which each byte that the
device still writes or reads is a hazard.
"""

import ctypes
import threading
from unittest.mock import Mock

import pytest
import torch

import ascend_emulator
from ascend_emulator.api import _runtime
from tests.conftest import SEED
from tests.engine.test_mooncake_store import found, pooled
from tests.helpers.engine import engine, free_blocks, generate, greedy, make_model
from tests.helpers.latent import LATENT_ON_NPUS, V3_EXPERTS_ON_NPUS
from tests.helpers.mooncake import MooncakeDistributedStore, stand_in_for_store
from tests.helpers.prefill_decode import DEVICE_TO_HOST, HOST_TO_DEVICE
from tests.helpers.prompts import prompts_of
from tests.npu.on_device import test_offloading
from tests.npu.on_device.test_offloading import BLOCK_SIZE, LENGTHS
from vllm_npu_prep.attention.mooncake_store import AfterSteps, Loads
from vllm_npu_prep.device import copy_stream

OTHERS = [100, 110]
CASES = {
    "fia": test_offloading.CASES["fia"],
    "atb": test_offloading.CASES["atb"],
    "latent": (
        "DeepseekV3",
        {**LATENT_ON_NPUS, **V3_EXPERTS_ON_NPUS, "spread": 0.1, "embedding_scale": 20},
        {"async_scheduling": True},
        "bfloat16",
    ),
}


def copy(target: int, source: int, size: int, kind: int) -> None:
    runtime = _runtime()
    runtime.aclrtMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_size_t] * 2 + [ctypes.c_int]
    assert runtime.aclrtMemcpy(target, size, source, size, kind) == 0


def read(start: int, size: int) -> bytes:
    on_host = ctypes.create_string_buffer(size)
    copy(ctypes.addressof(on_host), start, size, DEVICE_TO_HOST)
    return on_host.raw


def write(start: int, part: bytes) -> None:
    on_host = ctypes.create_string_buffer(part, len(part))
    copy(start, ctypes.addressof(on_host), len(part), HOST_TO_DEVICE)


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_stored_and_loaded_beside_steps(name, tmp_path, monkeypatch):
    """Tokens are those of an engine that computes all of them; no hazards."""
    stand_in_for_store(monkeypatch, tmp_path)
    monkeypatch.setattr(MooncakeDistributedStore, "read", staticmethod(read))
    monkeypatch.setattr(MooncakeDistributedStore, "write", staticmethod(write))
    family, config, mode, dtype = CASES[name]
    model = make_model(tmp_path / "model", family, **config)
    prompts, others = prompts_of(SEED, LENGTHS), prompts_of(SEED + 1, OTHERS)
    options = {"attention": "atb" if name == "atb" else "fia", "check": "full"}
    settings = {"dtype": dtype, "block_size": BLOCK_SIZE, "max_model_len": 192}
    settings |= {"additional_config": {"npu_prep": options}, **mode}
    with engine(model, **settings) as llm:
        expected = generate(llm, prompts + others, greedy(8))
    with engine(model, **pooled(**settings, num_gpu_blocks_override=24)) as llm:
        free = free_blocks(llm)
        assert generate(llm, prompts, greedy(8)) == expected[: len(prompts)]
        # They take the blocks of the first, which come back beside them
        assert generate(llm, others, greedy(8)) == expected[len(prompts) :]
        tokens, cached = found(llm, prompts + others)
        assert tokens == expected
        assert sum(cached) > sum(LENGTHS)
        assert free_blocks(llm) == free
    assert ascend_emulator.counters().hazards == 0


def test_a_load_begins_after_what_was_issued_before_it():
    """Its thread waits, though the host waits for nothing in between."""
    plane = torch.zeros(1 << 16, dtype=torch.int8, device="npu")
    torch.npu.synchronize()
    loads, begin = Loads(), copy_stream(plane.device)
    plane.fill_(7)
    loads.put(Mock(current_event=AfterSteps(plane.device, begin.copy([]))))

    def load() -> None:
        loads.get()
        write(plane.data_ptr(), bytes([3]) * len(plane))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert (plane == 3).all()
    assert ascend_emulator.counters().hazards == 0
