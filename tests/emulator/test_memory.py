"""Device memory: who may touch it, and what happens to it."""

import signal


def test_the_host_can_not_touch_device_memory(emulate):
    run = emulate(
        """
        x = torch.ones(8, device="npu")
        torch.npu.synchronize()
        ctypes.c_float.from_address(x.data_ptr() + 4).value
        """,
        expect_code=128 + signal.SIGSEGV,
    )
    assert "the host touched device memory" in run.err
    assert "byte 4 of allocation #1" in run.err
    assert run.report["hazards"]


def test_wrong_frees_are_refused(emulate):
    run = emulate(
        """
        torch.npu.set_device(0)
        address = malloc(4096)
        inside = ctypes.c_void_p(address.value + 512)
        assert acl.aclrtFree(inside) == 107000
        assert acl.aclrtFree(address) == 0
        assert acl.aclrtFree(address) == 107000
        host = ctypes.create_string_buffer(16)
        assert acl.aclrtFree(host) == acl.aclrtFreeHost(host) == 107000
        """
    )
    errors = " ".join(run.report["errors"])
    for message in ("free inside an allocation", "double free", "not device memory", "as pinned"):
        assert message in errors


def test_words_that_streams_write_and_wait_for_are_aligned(emulate):
    """CANN asks for 8 bytes of `aclrtValueWrite`; who waits reads what it wrote."""
    run = emulate(
        """
        torch.npu.set_device(0)
        stream, address = torch.npu.Stream(), malloc(4096).value
        write, wait = acl.aclrtValueWrite, acl.aclrtValueWait
        for offset, code in ((8, 0), (4, 107008), (1 << 16, 107000)):
            word = ctypes.c_void_p(address + offset), ctypes.c_uint64(7), ctypes.c_uint32(0)
            for call in (write, wait):
                assert call(*word, ctypes.c_void_p(stream.npu_stream)) == code, (call, offset)
        torch.npu.synchronize()
        """
    )
    assert "no multiple of 8" in run.report["errors"][0], run.report["errors"]


def test_memory_freed_while_a_stream_may_use_it_is_a_hazard(emulate):
    emulate(
        """
        torch.npu.set_device(0)
        stream, address, n = torch.npu.Stream(), malloc(4096), ctypes.c_size_t(4096)
        assert acl.aclrtMemsetAsync(address, n, 0, n, ctypes.c_void_p(stream.npu_stream)) == 0
        emulator.let_run()  # and the host can't know
        assert acl.aclrtFree(address) == 0
        assert "freed while a stream may still use it" in sync_error()
        """
    )


def test_leaks_at_exit_are_reported(emulate):
    """Tensors that are alive are none: a server's weights end with its process."""
    run = emulate(
        """
        torch.npu.set_device(0)
        malloc(12345)
        """
    )
    assert len(run.report["leaks"]) == 1 and "12800 bytes" in run.report["leaks"][0]
    assert run.report["held_at_exit"] == {}
    run = emulate(
        """
        import builtins
        builtins.kept = torch.ones(1 << 20, device="npu"), torch.zeros(8, device="npu")
        dropped = torch.ones(5 << 20, device="npu")
        del dropped
        """
    )
    assert run.report["leaks"] == []
    assert run.report["held_at_exit"]["blocks"] == 2
    assert 4 << 20 < run.report["held_at_exit"]["bytes"] <= 24 << 20
