"""Memory of the CPU fallback's process: what the C library keeps is returned."""

import ctypes
from types import SimpleNamespace
from unittest.mock import Mock

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_worker import Worker

from vllm_npu_prep.attention.step_memory import attention_bytes, process_bytes
from vllm_npu_prep.config import Decisions
from vllm_npu_prep.device import cpu
from vllm_npu_prep.device.cpu import CPUDevice
from vllm_npu_prep.prep.mask import COMPRESSED_MASK_SIZE, MaskForm
from vllm_npu_prep.worker import RETURN_TOKENS, NPUWorker

SIZE, COUNT = 64 << 10, 1600
"""Below glibc's threshold for mappings of their own: so they are holes in its heap."""


def test_free_memory_between_what_is_in_use_is_returned():
    """Every 16th allocation stays, so that the heap's end can't move back."""
    device, libc = CPUDevice(), ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    device.return_free_memory()
    before = device.memory_in_use()
    held = [libc.malloc(SIZE) for _ in range(COUNT)]
    for address in held:
        ctypes.memset(address, 1, SIZE)
    for index, address in enumerate(held):
        if index % 16:
            libc.free(address)
    kept = device.memory_in_use() - before
    device.return_free_memory()
    left = device.memory_in_use() - before
    for address in held[::16]:
        libc.free(address)
    assert kept > 0.9 * SIZE * COUNT, "glibc keeps holes"
    assert left < 0.2 * SIZE * COUNT


def test_free_memory_is_returned_while_nobody_waits_for_a_token(monkeypatch):
    """It takes milliseconds for each 100 MB."""
    monkeypatch.setattr(Worker, "execute_model", lambda *_: None)
    worker, step = NPUWorker.__new__(NPUWorker), SchedulerOutput.make_empty()
    worker.prep_device, worker.parallel_config = device, _ = Mock(), Mock(world_size=1)
    step.total_num_scheduled_tokens = RETURN_TOKENS + 1
    worker.execute_model(step)  # a prompt
    step.total_num_scheduled_tokens = 1
    step.scheduled_cached_reqs.req_ids = ["goes on"]
    step.finished_req_ids = {"another"}
    worker.execute_model(step)
    device.return_free_memory.assert_not_called()
    worker.execute_model(SchedulerOutput.make_empty())
    worker.execute_model(SchedulerOutput.make_empty())  # few tokens since
    device.return_free_memory.assert_called_once_with()


def test_the_bound_of_a_step_has_room_for_a_huge_page(tmp_path, monkeypatch):
    """On aarch64 one may have 512 MiB, and the kernel takes all of it for the first byte."""
    page = tmp_path / "hpage_pmd_size"
    monkeypatch.setattr(cpu, "HUGE_PAGE", page)
    without = process_bytes(1024)
    page.write_text("536870912\n")
    assert process_bytes(1024) == without + (512 << 20)


def test_attention_is_bounded_by_masks_and_its_largest_layer():
    def attends(working: int) -> SimpleNamespace:
        kernels = SimpleNamespace(working_bytes=lambda *_: working)
        return SimpleNamespace(impl=SimpleNamespace(kernels=kernels, layer_shape="shape"))

    layers = [attends(7000), attends(500), SimpleNamespace(choosing_bytes=lambda *_: 300)]
    dense = Decisions("cpu", MaskForm.DENSE, 0, 50)
    constant = Decisions("cpu", MaskForm.COMPRESSED, 0, 50)
    assert attention_bytes(layers, dense, 2, 1024, 0, 64) == 50 + 7000 + 300
    assert attention_bytes([SimpleNamespace()], dense, 2, 1024, 0, 64) == 50
    assert attention_bytes([], constant, 2, 1024, 0, 64) == COMPRESSED_MASK_SIZE**2
