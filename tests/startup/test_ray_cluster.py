"""What is asked of a Ray cluster before an engine starts, and what its workers are told."""

import importlib.util
import logging
import os
import threading
from types import SimpleNamespace

import pytest

from tests.helpers.engine import engine_config, make_model
from tests.helpers.waiting import LIMIT
from vllm_npu_prep import device
from vllm_npu_prep.compat import activation
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.ranks import ranks_on_host
from vllm_npu_prep.startup import ray_cluster

HOW = r"ray start.*--head.*--resources '\{\"NPU\": N\}'"


@pytest.fixture
def offer(monkeypatch):
    """Lets a cluster offer something, or None be found; returns how often it was asked."""
    asked = []

    def offer(resources: dict[str, float] | None) -> list[int]:
        monkeypatch.setattr(ray_cluster, "_resources", lambda: asked.append(1) or resources)
        return asked

    return offer


def parallel(num_ranks: int = 2, **environment) -> SimpleNamespace:
    return SimpleNamespace(
        world_size=num_ranks, ray_runtime_env=environment or None, data_parallel_backend="mp"
    )


@pytest.mark.parametrize(
    ("resources", "address", "message"),
    [
        (None, None, "no Ray cluster on this host"),
        (None, "10.0.0.1:6379", "no Ray cluster at RAY_ADDRESS=10.0.0.1:6379"),
        ({"CPU": 8.0}, None, "the Ray cluster offers no NPU"),
    ],
)
def test_a_cluster_without_npus_is_refused_with_what_to_start(
    offer, monkeypatch, resources, address, message
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    offer(resources)
    with pytest.raises(PrepError, match=f"--distributed-executor-backend ray: {message}; .*{HOW}"):
        ray_cluster.prepare_for_workers(parallel(), device.CPU_KIND)


def test_workers_get_the_device_and_the_folder_of_counts(offer, monkeypatch):
    """Hosts that have yet to join are waited for; vLLM checks a config several times."""
    monkeypatch.setenv("NPU_PREP_METRICS_DIR", "/counts")
    asked = offer({"NPU": 1.0})
    config = parallel(4, env_vars={"A": "1"}, working_dir="/models")
    for _ in range(2):
        ray_cluster.prepare_for_workers(config, device.CPU_KIND)
    assert config.ray_runtime_env == {
        "env_vars": {"A": "1", "NPU_PREP_DEVICE": "cpu", "NPU_PREP_METRICS_DIR": "/counts"},
        "working_dir": "/models",
    }
    assert len(asked) == 1


@pytest.mark.parametrize(("num_ranks", "fits"), [(2, True), (3, False)])
def test_ranks_that_this_host_can_hold_need_no_cluster(offer, monkeypatch, num_ranks, fits):
    """vLLM starts one then, of this host alone."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("NPU_PREP_METRICS_DIR", raising=False)
    monkeypatch.setattr(ray_cluster, "visible_devices", lambda device_type: 2)
    offer(None)
    config = parallel(num_ranks)
    if fits:
        ray_cluster.prepare_for_workers(config, device.NPU_KIND)
        assert config.ray_runtime_env == {"env_vars": {"NPU_PREP_DEVICE": "npu"}}
    else:
        with pytest.raises(PrepError, match="no Ray cluster on this host"):
            ray_cluster.prepare_for_workers(config, device.NPU_KIND)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1)


def test_a_missing_ray_is_named_with_what_to_install(model, monkeypatch):
    from vllm.v1.executor import ray_utils

    find_spec = importlib.util.find_spec

    def without_ray(name: str):
        return None if name == "ray" else find_spec(name)

    monkeypatch.setattr(ray_utils, "assert_ray_available", ray_utils.assert_ray_available)
    monkeypatch.setattr(importlib.util, "find_spec", without_ray)
    activation.prepare_process()
    with pytest.raises(PrepError, match=r"Ray is not installed; .*pip install .*\[ray\]"):
        engine_config(model, distributed_executor_backend="ray", tensor_parallel_size=2)


def test_the_start_up_block_names_the_ranks_and_who_starts_them(model, offer, caplog):
    offer({"NPU": 2.0})
    with caplog.at_level(logging.INFO, logger="vllm"):
        config = engine_config(
            model,
            distributed_executor_backend="ray",
            tensor_parallel_size=2,
            pipeline_parallel_size=3,
        )
    assert (
        "ranks         2 tensor parallel x 3 pipeline stages, started by ray, over gloo"
        in caplog.text
    )
    told = config.parallel_config.ray_runtime_env["env_vars"]
    assert told == {name: os.environ[name] for name in ("NPU_PREP_DEVICE", "NPU_PREP_METRICS_DIR")}


@pytest.mark.parametrize(("assigned", "num_ranks"), [([4, 5, 6], 3), (None, 1)])
def test_workers_of_one_host_know_how_many_they_are(assigned, num_ranks):
    """The server does not."""
    config = SimpleNamespace(use_ray=True, assigned_physical_gpu_ids=assigned)
    assert ranks_on_host(config) == num_ranks


def test_a_host_keeps_its_address_and_its_devices_to_itself(monkeypatch):
    from vllm.v1.executor.ray_env_utils import get_driver_env_vars
    from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

    activation.prepare_process()
    for name in ("ASCEND_RT_VISIBLE_DEVICES", "HCCL_IF_IP", "VLLM_HOST_IP", "HCCL_CONNECT_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    carried = get_driver_env_vars(WORKER_SPECIFIC_ENV_VARS)
    assert not carried.keys() & {"ASCEND_RT_VISIBLE_DEVICES", "HCCL_IF_IP", "VLLM_HOST_IP"}
    assert carried["HCCL_CONNECT_TIMEOUT"] == "1"


def test_who_waits_for_another_host_hears_of_all(monkeypatch):
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    activation.prepare_process()
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()
    writer.enqueue("output")
    assert reader.dequeue(timeout=LIMIT) == "output"
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0)
    poll, waits = reader.remote_socket.poll, threading.Event()

    def waited(*args):
        waits.set()
        return poll(*args)

    monkeypatch.setattr(reader, "remote_socket", SimpleNamespace(poll=waited))
    ending = threading.Thread(target=lambda: waits.wait(LIMIT) and reader.shutdown())
    ending.start()
    with pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue(timeout=2 * LIMIT)
    ending.join()
