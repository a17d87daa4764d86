"""HCCL between emulated devices: results, groups, graphs, hazards."""


def test_halves_are_summed_in_float32_in_rank_order(ranks):
    """And rounded once; other reductions are rows of `verify-device`."""
    run = ranks(
        """
        def inputs(dtype, n):
            generator = torch.Generator().manual_seed(n)
            return [torch.randn(n, generator=generator).to(dtype) for _ in range(3)]

        def rank_main(rank):
            for dtype in (torch.float16, torch.float32, torch.bfloat16):
                for n in (1, 7, 1000, 70_001):     # 1000 bytes in one step, 70,001 by shares
                    tensors = inputs(dtype, n)
                    expected = sum(each.float() for each in tensors).to(dtype)
                    summed = tensors[rank].npu()
                    dist.all_reduce(summed)
                    assert torch.equal(summed.cpu(), expected), (dtype, n)
                    part = torch.empty(n // 3, dtype=dtype, device="npu")
                    dist.reduce_scatter_single(part, tensors[rank][: n // 3 * 3].npu())
                    assert torch.equal(part.cpu(), expected[: n // 3 * 3].chunk(3)[rank])
            nan = torch.tensor([1.0, float("nan") if rank == 2 else 2.0], device="npu")
            dist.all_reduce(nan, dist.ReduceOp.MAX)
            assert nan.cpu()[0] == 1 and nan.cpu()[1].isnan()
            half = torch.tensor([2048.0, 1.0, 1.0][rank], dtype=torch.float16, device="npu")
            dist.all_reduce(half)
            assert half.item() == 2050             # rounded after each operand: 2048

        run_ranks(rank_main, 3)
        """
    )
    assert not run.report["hazards"]


def test_groups_overlap_and_are_made_again(ranks):
    run = ranks(
        """
        def rank_main(rank):
            halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            odd_even = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            half, third = halves[rank // 2], odd_even[rank % 2]
            totals = [torch.tensor(float(rank + 1), device="npu") for _ in range(3)]
            works = [dist.all_reduce(t, group=g, async_op=True)
                     for t, g in zip(totals, (None, half, third))]
            for work in reversed(works):
                work.wait()
            assert [t.item() for t in totals] == [10, (3, 7)[rank // 2], (4, 6)[rank % 2]]
            world = dist.group.WORLD._get_backend(torch.device("npu"))
            name = world.get_hccl_comm_name(dist.get_rank())
            dist.destroy_process_group(half)
            again = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
            total = torch.tensor(float(rank), device="npu")
            dist.all_reduce(total, group=again)
            assert total.item() == (1, 5)[rank // 2]
            dist.destroy_process_group()
            return name

        first, *others = run_ranks(rank_main, 4)
        assert first and others == [first] * 3, others
        """
    )
    assert not run.report["hazards"] and not run.report["leaks"]


def test_a_missing_wait_names_rank_operator_and_streams(ranks):
    run = ranks(
        """
        def rank_main(rank):
            x = torch.ones(1000, device="npu")
            dist.all_reduce(x)
            torch.npu.synchronize()
            work = dist.all_reduce(x, async_op=True)
            if rank == 1:
                x.sum()                        # the bug: the result is used without waiting
            used = sync_error()
            work.wait()
            source, target = torch.ones(4, device="npu"), torch.empty(8, device="npu")
            torch.npu.synchronize()
            work = dist.all_gather_single(target, source, async_op=True)
            if rank == 0:
                source.add_(1)                 # the bug: rewritten under the collective
            rewritten = sync_error()
            work.wait()
            dist.destroy_process_group()
            return [used, rewritten]

        zero, one = run_ranks(rank_main)
        assert zero[0] == one[1] == "", (zero, one)
        # Which of the two runs first is chance; that nothing orders them is found either way.
        for text, collective, operator in (
            (one[0], "HcclAllReduce of rank 1 of 2 in", "aten::sum on stream"),
            (zero[1], "HcclAllGather of rank 0 of 2 in", "aten::add_ on stream"),
        ):
            assert "read after write" in text or "write after read" in text, text
            assert collective in text and operator in text, text
        assert one[0].count(" on stream ") == 2 and "of npu:1" in one[0], one[0]
        """
    )
    assert len(run.report["hazards"]) == 2


def test_a_communicator_on_two_streams_needs_an_order(ranks):
    """Its buffers would be used by two collectives at once."""
    run = ranks(
        """
        def rank_main(rank):
            x, y = torch.ones(4, device="npu"), torch.ones(4, device="npu")
            dist.all_reduce(x)
            graph = capture_sum(y)
            torch.npu.synchronize()
            work = dist.all_reduce(x, async_op=True)
            emulator.let_run()                 # orders nothing, but lets it be first on each rank
            graph.replay()                     # the bug: on a stream that doesn't wait for it
            message = sync_error()
            work.wait()
            return message

        messages = run_ranks(rank_main)
        for rank, message in enumerate(messages):
            assert f"HcclAllReduce of rank {rank} of 2" in message, message
            assert "write after write" in message and "communicator" in message, message
        """
    )
    assert len(run.report["hazards"]) == 2
