"""What real HCCL reports badly or not at all: each mistake gives one fault that names who did what.

Each test plants a mistake in forked ranks, and reads what their next sync raises.
"""

import os
import re
from pathlib import Path


def test_ranks_that_disagree_get_one_fault_that_names_both_calls(ranks):
    """Another collective, count or root, an unequal pair.

    Or another graph: HCCL wants all ranks to replay that of one and the same capture.
    """
    ranks(
        """
        def out(n):
            return torch.empty(n, device="npu")

        def replay(number):
            x = ones()
            graphs = [capture_sum(x), capture_sum(x)]
            graphs[number].replay()

        CASES = {
            "collective": (lambda: dist.all_reduce(ones()), lambda: dist.broadcast(ones(), 0),
                           "rank 0 calls HcclAllReduce #2 (8 of float32, sum), "
                           "rank 1 calls HcclBroadcast #2 (8 of float32, root 0)"),
            "count": (lambda: dist.all_reduce(ones(4)), lambda: dist.all_reduce(ones(5)),
                      "rank 0 calls HcclAllReduce #2 (4 of float32, sum), "
                      "rank 1 calls HcclAllReduce #2 (5 of float32, sum)"),
            "root": (lambda: dist.broadcast(ones(), 0), lambda: dist.broadcast(ones(), 1),
                     "rank 0 calls HcclBroadcast #2 (8 of float32, root 0), "
                     "rank 1 calls HcclBroadcast #2 (8 of float32, root 1)"),
            "counts": (lambda: dist.all_to_all_single(out(5), ones(4), [2, 3], [2, 2]),
                       lambda: dist.all_to_all_single(out(4), ones(4), [2, 2], [2, 2]),
                       "counts of HcclAlltoAllV #2 (float32, counts for each rank) disagree: "
                       "rank 1 gives rank 0 8 bytes, rank 0 expects 12 bytes of it"),
            "pair": (lambda: dist.send(ones(4), 1), lambda: dist.recv(ones(4, torch.int32), 0),
                     "rank 0 calls HcclSend #1 (4 of float32, with rank 1), "
                     "rank 1 calls HcclRecv #1 (4 of int32, with rank 0)"),
            "graph": (lambda: replay(0), lambda: replay(1),
                      "sum, captured as #1), rank 1 calls HcclAllReduce #2 (8 of float32, sum, "
                      "captured as #2)"),
        }

        def rank_main(rank):
            dist.all_reduce(ones())
            calls[rank]()
            return sync_error()

        for name, (*calls, text) in CASES.items():
            messages = messages_of(rank_main)
            assert text in messages[0], (name, text, messages[0])
        """
    )


def test_a_rank_that_skips_a_collective_is_named_with_its_last(ranks):
    ranks(
        """
        def rank_main(rank):
            dist.all_reduce(ones())
            dist.broadcast(ones(3), 0)
            torch.npu.synchronize()
            if rank == 1:                # the bug: it skips one
                assert over.wait(LIMIT)
                return ""
            acl.emulator_set_hang_seconds(1)
            dist.all_reduce(ones())
            message = sync_error()
            over.set()
            return message

        message = run_ranks(rank_main)[0]
        assert re.search(r"rank 1 [(]process .* did not come in \\d+ s", message), message
        assert ("it is in no collective; its last was HcclBroadcast #2 (3 of float32, root 0) "
                "(2 calls so far); rank 0 is in HcclAllReduce #3 (8 of float32, sum)"
                ) in message, message
        """
    )


def test_two_ranks_that_both_send_first_are_named(ranks):
    """Such sends end on no device, unless the payload happens to fit into its buffers."""
    ranks(
        """
        sent = [FORKS.Event() for _ in range(2)]

        def rank_main(rank):
            dist.send(ones(), 1 - rank)
            wait_until(is_inside)
            sent[rank].set()
            assert sent[1 - rank].wait(LIMIT)
            acl.emulator_set_hang_seconds(1)
            dist.recv(ones(), 1 - rank)
            return sync_error()

        messages = messages_of(rank_main)
        assert messages[0].count("is in HcclSend #1 (8 of float32, with rank") == 2, messages[0]
        """
    )


def test_a_rank_that_dies_is_named_at_once_and_leaves_nothing(ranks):
    """By SIGKILL, in the middle of a collective: nothing is left in /dev/shm or in TMPDIR."""
    folders = [Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp"))]

    def left():
        paths = [path for folder in folders for path in folder.iterdir()]
        return {path for path in paths if "hccl" in path.name.lower()}

    before = left()
    ranks(
        """
        victim = FORKS.Value("i", 0)

        def rank_main(rank):
            begun()
            if rank == 1:
                work = dist.broadcast(ones(), 2, async_op=True)  # rank 2 has not come
                wait_until(is_inside)
                victim.value = os.getpid()
                over.set()
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 2:
                assert over.wait(LIMIT)
                wait_until(lambda: not psutil.pid_exists(victim.value))
            dist.broadcast(ones(), 2)
            return sync_error()

        _, _, third = messages_of(rank_main, count=3, codes=[0, -9, 0])
        assert "rank 1 (process " in third and "died while it was waited for" in third, third
        assert "it is in HcclBroadcast #2 (8 of float32, root 2)" in third, third

        def all_die(rank):
            begun()
            os.kill(os.getpid(), signal.SIGKILL)

        run_ranks(all_die, codes=-9)
        """
    )
    assert left() == before


def test_a_group_destroyed_early_is_named(ranks):
    """By another rank that still waits, and by the rank's own graph."""
    ranks(
        """
        def rank_main(rank):
            begun()
            if rank == 1:
                dist.destroy_process_group()
                assert over.wait(LIMIT)
                return ""
            dist.all_reduce(ones())
            message = sync_error()
            over.set()
            return message

        message = run_ranks(rank_main)[0]
        assert "rank 1 destroyed the communicator while it was waited for" in message, message
        assert "rank 0 is in HcclAllReduce #2" in message, message

        def replays(rank):
            x = ones()
            dist.all_reduce(x)
            graph = capture_sum(x)
            torch.npu.synchronize()
            dist.destroy_process_group()
            graph.replay()
            return sync_error()

        for rank, message in enumerate(run_ranks(replays)):
            assert f"rank {rank} runs HcclAllReduce #2" in message, message
            assert "captured as #1) after having destroyed the communicator" in message, message
        """
    )


def test_what_a_communicator_needs_is_checked_when_it_is_made(ranks):
    run = ranks(
        """
        root = ctypes.create_string_buffer(4108)

        def join(rank, device=None):
            torch.npu.set_device(rank if device is None else device)
            torch.empty(1, device="npu")
            handle = ctypes.c_void_p()
            return hccl.HcclCommInitRootInfo(2, root, rank, ctypes.byref(handle))

        assert hccl.HcclGetRootInfo(root) == 0
        assert run_ranks(lambda rank: join(rank, device=0), group=False) == [1, 1]
        hccl.HcclGetRootInfo(root)
        acl.emulator_set_hang_seconds(1)
        absent = run_ranks(lambda rank: rank or join(rank), group=False)
        assert absent == [9, 1], absent
        acl.emulator_set_hang_seconds(0)                            # the command's again
        os.environ["HCCL_BUFFSIZE"] = "9000"                        # of a card with 8 GiB
        hccl.HcclGetRootInfo(root)
        assert run_ranks(lambda rank: join(rank), group=False) == [24, 24]
        """
    )
    errors = "\n".join(run.report["errors"])
    assert re.search(r"rank 1 did not come in \d+ s; it has not joined", errors), errors
    for part in (
        "ranks 0 and 1 are both on npu:0; each needs a device of its own (torch.npu.set_device)",
        "needs 2 x 9000 MB of npu:0, which has less left: lower HCCL_BUFFSIZE",
    ):
        assert part in errors, (part, errors)


def test_a_failure_that_no_sync_reports_ends_the_process(ranks):
    """torch_npu's watchdog asks for asynchronous errors every second."""
    run = ranks(
        """
        def rank_main(rank):
            begun()
            dist.all_reduce(ones()) if rank else dist.broadcast(ones(), 0)
            signal.pause()               # waits for something else

        run_ranks(rank_main, codes=[-6, -6])
        """
    )
    assert "rank 0 calls HcclBroadcast #2" in run.err
