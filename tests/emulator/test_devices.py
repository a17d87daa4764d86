"""Devices, generators, and functions that nobody has written."""


def test_visible_devices_and_the_chip_are_honoured(emulate):
    emulate(
        """
        assert torch.npu.device_count() == 2          # 7 is no device, and ends the list
        assert torch.npu.get_device_name(0) == "Ascend910_9391"
        """,
        devices=4,
        soc="Ascend910_9391",
        environment={"ASCEND_RT_VISIBLE_DEVICES": "3,1,7"},
    )


def test_generators_are_seeded_and_differ_from_the_cpus(emulate):
    emulate(
        """
        def draw(seed):
            torch.npu.manual_seed(seed)
            return torch.rand(64, device="npu").cpu(), torch.randn(64, device="npu").cpu()
        first, again, other = draw(7), draw(7), draw(8)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
        assert not torch.equal(first[0], other[0])
        torch.manual_seed(7)
        assert not torch.equal(first[0], torch.rand(64))
        own = torch.Generator(device="npu")
        own.manual_seed(7)
        assert torch.equal(torch.rand(64, device="npu", generator=own).cpu(), first[0])
        assert sorted(torch.randperm(9, device="npu").cpu().tolist()) == list(range(9))
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            x = torch.rand(64, device="npu")
        torch.npu.manual_seed(7)
        graph.replay()
        assert torch.equal(x.cpu(), first[0])
        graph.replay()
        assert not torch.equal(x.cpu(), first[0])     # every replay draws anew
        state = torch.get_rng_state()
        torch.rand(8, device="npu").cpu()
        assert torch.equal(state, torch.get_rng_state())
        refused(torch.rand, 4, device="npu", generator=torch.Generator())
        """
    )


def test_an_unimplemented_function_ends_the_process_by_name(emulate):
    atb = emulate("acl._ZN3atb13CreateContextEPPNS_7ContextE()", expect_code=134)
    assert "atb::CreateContext(atb::Context**) is not implemented" in atb.err
    run = emulate("acl.aclrtMemImportFromShareableHandle()", expect_code=134)
    message = "aclrtMemImportFromShareableHandle is not implemented"
    assert f"{message} by the emulated Ascend runtime" in run.err
    assert message in run.report["errors"][0]
