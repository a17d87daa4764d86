"""Regions of planes over Mooncake: which heads of which blocks go where, and whose failures."""

import asyncio
import ctypes
import queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeXferMetadata,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    PullReqMeta,
    SendBlockMeta,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from tests.helpers.waiting import until
from vllm_npu_prep.attention.mooncake import (
    KeptBlocks,
    MooncakeConnector,
    PatientContext,
    PlaneWorker,
    Unanswered,
    _is_gone,
)

BLOCKS, BLOCK_SIZE, HEAD_SIZE, HEADS = 6, 4, 8, 4
NAMES = ["model.layers.0.attn", "model.layers.1.attn"]
SENT, ASKED = [1, 2, 4], [5, 0, 3]  # not all of them neighbours


class Engine:
    """A transfer engine that only takes memory."""

    def batch_register_memory(self, starts: list[int], sizes: list[int]) -> int:
        return 0


def rank_of(rank: int, size: int, dtype: torch.dtype = torch.float32) -> PlaneWorker:
    """A rank's worker, its planes registered; each head holds its number, on a producer."""
    worker: Any = PlaneWorker.__new__(PlaneWorker)
    heads = max(HEADS // size, 1)
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=dtype
    )
    worker.kv_cache_config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(NAMES, spec)])
    worker._layer_specs = dict.fromkeys(NAMES, spec)
    worker.tp_rank, worker.tp_size, worker.pp_size, worker.use_mla = rank, size, 1, False
    worker._physical_blocks_per_logical_kv_block = 1
    worker._prepared_transfer_regions, worker._failing = {}, set()
    worker.transfer_topo = TransferTopology(
        rank, size, BLOCK_SIZE, "engine", False, False, HEADS, attn_backends=[]
    )
    context = SimpleNamespace(static_forward_context=dict.fromkeys(NAMES))
    worker.vllm_config = SimpleNamespace(compilation_config=context)
    worker.engine, worker.is_kv_consumer = Engine(), True
    shape = 2, BLOCKS, BLOCK_SIZE, heads, HEAD_SIZE
    worker.register_kv_caches({name: torch.zeros(shape, dtype=dtype) for name in NAMES})
    return worker


def first_head(rank: int, size: int) -> int:
    return rank * HEADS // size


def fill(worker: PlaneWorker, whole: dict[str, torch.Tensor]) -> None:
    """Give a rank its heads of whole planes."""
    for name, cache in worker.device_kv_caches.items():
        begin = first_head(worker.tp_rank, worker.tp_size)
        cache.copy_(whole[name][..., begin : begin + cache.shape[3], :])


def ask(consumer: PlaneWorker) -> MooncakeXferMetadata:
    """What a rank of the decoding engine asks for."""
    return MooncakeXferMetadata(
        remote_hostname="here",
        remote_port=1,
        remote_tp_size=consumer.tp_size,
        remote_tp_rank=consumer.tp_rank,
        req_blocks={"decoded": ("transfer", [ASKED])},
        kv_caches_base_addr=consumer.kv_caches_base_addr,
        block_lens=consumer.block_len_per_layer,
        kv_block_lens=consumer.kv_block_len_per_layer,
        registered_layer_names=consumer.registered_layer_names,
        registered_layer_indices=consumer.registered_layer_indices,
        registered_group_indices=consumer.registered_group_indices,
        registered_shared_group_ids=[[*each] for each in consumer.region_shared_groups],
        registered_row_offsets=consumer.region_row_offsets,
    )


def send(producer: PlaneWorker, consumer: PlaneWorker) -> tuple[int, str | None]:
    """Copy what the producer's plan says, without a network: the copies, and what was wrong."""
    asked = ask(consumer)
    local, remote, error = producer._prepare_transfer_regions(asked)
    if error is not None:
        return 0, error
    ready = [("decoded", SendBlockMeta("computed", "transfer", [SENT], None))]  # type: ignore[arg-type]
    *lists, _, error = asyncio.run(producer._build_transfer_params(ready, asked, local, remote))
    for source, target, size in zip(*lists, strict=True):
        ctypes.memmove(target, source, size)
    return len(lists[0]), error


@pytest.mark.parametrize("consumers", [1, 2, 4, 8])
@pytest.mark.parametrize("producers", [1, 2, 4, 8])
def test_ranks_of_any_number_get_their_heads(seed, producers, consumers):
    """Eight ranks have the heads of four twice; blocks that were not asked for stay zero."""
    generator = torch.Generator().manual_seed(seed)
    shape = 2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE
    whole = {name: torch.randn(shape, generator=generator) for name in NAMES}
    senders = [rank_of(rank, producers) for rank in range(producers)]
    for each in senders:
        fill(each, whole)
    for rank in range(consumers):
        consumer = rank_of(rank, consumers)
        for paired in consumer.transfer_topo.handshake_target_ranks(producers):
            copies, error = send(senders[paired], consumer)
            assert error is None
            assert producers != consumers or copies == 2 * len(NAMES) * 3
        begin = first_head(rank, consumers)
        for name, cache in consumer.device_kv_caches.items():
            expected = torch.zeros_like(cache)
            expected[:, ASKED] = whole[name][:, SENT, :, begin : begin + cache.shape[3]]
            assert torch.equal(cache, expected)


def test_neighbouring_blocks_are_one_copy():
    """Of each plane: two layers have four."""
    producer, consumer = rank_of(0, 1), rank_of(0, 1)
    local, remote, _ = producer._prepare_transfer_regions(ask(consumer))
    ready: Any = [("decoded", SendBlockMeta("computed", "transfer", [[1, 2, 3]], None))]  # type: ignore[arg-type]
    asked = ask(consumer)
    asked.req_blocks = {"decoded": ("transfer", [[3, 4, 5]])}
    *lists, _, _ = asyncio.run(producer._build_transfer_params(ready, asked, local, remote))
    assert [len(each) for each in lists[:3]] == [4] * 3


def test_planes_of_another_dtype_are_refused():
    copies, error = send(rank_of(0, 1, torch.float16), rank_of(0, 1, torch.bfloat16))
    assert copies == 0 and error is not None and "attn in torch.float16" in error


def test_recurrent_states_need_ranks_of_the_same_number():
    producer, consumer = rank_of(0, 1), rank_of(0, 2)
    states = MambaSpec(block_size=4, shapes=((1,),), dtypes=(torch.float32,))
    producer.kv_cache_config.kv_cache_groups.append(KVCacheGroupSpec(["states"], states))
    assert send(producer, consumer) == (
        0,
        "Recurrent states can't be divided among other ranks: the tensor-parallel size is 1 where "
        "prompts are computed, and 2 where they are decoded; give both engines the same",
    )


# --------------------------------------------------------------------- failures


class Reports:
    """What upstream is told of requests that could not be received."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
        self.failed: list[str] = []
        worker.xfer_stats = SimpleNamespace(record_failed_recv=lambda: None)
        worker._is_hma_required = True
        worker._failed_recv_reqs = SimpleNamespace(put=self.failed.append)
        worker.finished_recving_reqs = set()


def pulls(count: int, *req_ids: str) -> dict[str, PullReqMeta]:
    """Requests that `count` ranks of the producer send."""
    return {
        each: PullReqMeta(each, each, [[1]], "producer", "", pull_tasks_count=count)
        for each in req_ids
    }


def answer(ok: list[str], failed: list[str] | None = None) -> MooncakeXferResponse:
    return MooncakeXferResponse(MooncakeXferResponseStatus.CONTINUE, ok, failed)


@pytest.mark.parametrize("first", ["ok", "failed"])
def test_blocks_are_given_up_after_the_last_rank_that_writes(monkeypatch, first):
    """Of two ranks one can't send; the other one may still write until it has answered."""
    worker: Any = rank_of(0, 1)
    reports, metas = Reports(monkeypatch, worker), pulls(2, "one")
    of_ranks = [dict(metas), dict(metas)]
    turns = [answer(["one"]), answer([], ["one"])]
    for turn, unanswered in zip(turns if first == "ok" else turns[::-1], of_ranks):
        assert reports.failed == [] and worker.finished_recving_reqs == set()
        worker.process_pulling_result(turn, unanswered)
        assert unanswered == {}
    assert reports.failed == ["one"] and worker.finished_recving_reqs == {"one"}


@pytest.mark.parametrize("copies", [False, True], ids=["0.32.0", "0.33.0"])
def test_a_dead_producer_fails_only_what_it_has_not_answered(monkeypatch, copies):
    """Requests that have arrived decode already: nobody may take their blocks from them.

    vLLM 0.33.0 counts answers in a copy of the requests.
    """
    worker: Any = rank_of(0, 1)
    reports, gone = Reports(monkeypatch, worker), asyncio.Event()

    async def pull(self: Any, address: str, metas: dict[str, PullReqMeta]) -> None:
        worker.process_pulling_result(answer(["first"]), metas.copy() if copies else metas)
        gone.set()
        await asyncio.Event().wait()  # no answer comes any more

    async def is_gone(address: str) -> bool:
        return gone.is_set()

    monkeypatch.setattr("vllm_npu_prep.attention.mooncake._is_gone", is_gone)
    monkeypatch.setattr("vllm_npu_prep.attention.mooncake.SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(PlaneWorker.__bases__[0], "receive_kv_from_single_worker", pull)
    metas = pulls(1, "first", "second")
    asyncio.run(worker.receive_kv_from_single_worker("tcp://127.0.0.1:1", metas))
    assert reports.failed == ["second"]
    assert worker.finished_recving_reqs == {"first", "second"}


@pytest.mark.parametrize("ends", ["answers", "is gone"])
def test_blocks_of_a_stalled_producer_are_kept_until_it_ends(monkeypatch, ends):
    """Its requests are given up before; each block is kept and released once."""
    worker: Any = rank_of(0, 1)
    worker._kept = queue.SimpleQueue()
    reports, ended, looks = Reports(monkeypatch, worker), asyncio.Event(), []

    async def pull(self: Any, address: str, metas: dict[str, PullReqMeta]) -> None:
        await ended.wait()
        if ends == "is gone":
            await asyncio.Event().wait()  # no answer comes any more

    async def is_gone(address: str) -> bool:
        looks.append(address)
        return ends == "is gone" and ended.is_set()

    async def stall() -> None:
        metas = pulls(1, "first", "second")
        metas["second"].local_block_ids = [[4, 3]]
        pulled = asyncio.ensure_future(worker.receive_kv_from_single_worker("tcp://a:1", metas))
        await until(lambda: reports.failed)
        assert reports.failed == ["first", "second"]
        assert worker.changes_of_kept() == KeptBlocks([1, 4, 3], [])
        seen = len(looks)
        await until(lambda: len(looks) > seen + 1)
        assert worker.changes_of_kept() is None
        ended.set()
        await pulled
        assert worker.changes_of_kept() == KeptBlocks([], [1, 4, 3])

    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "0")
    of_module = "vllm_npu_prep.attention.mooncake."
    monkeypatch.setattr(of_module + "_is_gone", is_gone)
    monkeypatch.setattr(of_module + "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(of_module + "SECONDS_AFTER_TIMEOUT", 0)
    monkeypatch.setattr(PlaneWorker.__bases__[0], "receive_kv_from_single_worker", pull)
    asyncio.run(stall())
    assert reports.failed == ["first", "second"]


def test_a_block_is_kept_until_no_rank_may_write_to_it():
    """Ranks say together what has changed; they are asked on until they keep nothing."""
    connector: Any = MooncakeConnector.__new__(MooncakeConnector)
    connector._num_kept, pool = 0, BlockPool(8, enable_caching=False, hash_block_size=BLOCK_SIZE)
    connector.bind_gpu_block_pool(pool)
    free = pool.get_num_free_blocks()

    def told(one: KeptBlocks, other: KeptBlocks) -> tuple[int, bool]:
        output: Any = SimpleNamespace(kv_connector_worker_meta=one.aggregate(other))
        connector.update_connector_output(output)
        return free - pool.get_num_free_blocks(), connector.has_pending_push_work()

    assert told(KeptBlocks([3, 4], []), KeptBlocks([4, 5], [])) == (3, True)
    assert told(KeptBlocks([], [3, 4]), KeptBlocks([], [])) == (2, True)
    assert told(KeptBlocks([], []), KeptBlocks([], [4, 5])) == (0, False)


def test_only_idle_steps_take_time_while_blocks_are_kept(monkeypatch):
    """An engine without requests would else step as often as it can, perhaps for hours."""
    slept: list[float] = []
    of_module = "vllm_npu_prep.attention.mooncake."
    monkeypatch.setattr(of_module + "time", SimpleNamespace(sleep=slept.append))
    upstream = MooncakeConnector.__bases__[0]
    monkeypatch.setattr(upstream, "build_connector_meta", lambda self, output: "of ranks")
    connector: Any = MooncakeConnector.__new__(MooncakeConnector)
    for kept, tokens, times in ((0, 0, 0), (3, 5, 0), (3, 0, 1)):
        connector._num_kept, output = kept, SimpleNamespace(total_num_scheduled_tokens=tokens)
        assert connector.build_connector_meta(output) == "of ranks"
        assert len(slept) == times


def test_blocks_of_all_groups_are_kept():
    metas = pulls(1, "one", "other")
    metas["one"].local_block_ids = [[1, 2], [3]]
    metas["other"].local_block_ids = [[4], []]
    assert Unanswered(metas).blocks() == [1, 2, 3, 4]


def test_no_limit_of_time_ends_the_wait_for_a_late_producer():
    """Upstream sets one on each of its sockets, beside other options."""
    with PatientContext() as context, context.socket(zmq.REQ) as made:
        made.setsockopt(zmq.RCVTIMEO, 5)
        made.setsockopt(zmq.LINGER, 0)
        assert (made.getsockopt(zmq.RCVTIMEO), made.getsockopt(zmq.LINGER)) == (-1, 0)


def test_a_host_that_says_nothing_may_come_back(monkeypatch):
    """A look ends after its time, so that requests can be given up."""

    async def silent(host: str, port: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("vllm_npu_prep.attention.mooncake.SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(asyncio, "open_connection", silent)
    assert not asyncio.run(asyncio.wait_for(_is_gone("tcp://[::1]:1"), 10))
