"""Addresses that are reserved, and physical memory that is mapped to them."""

import signal

PAGES = """
    import ctypes
    from ctypes import byref, c_size_t, c_uint64, c_void_p
    MIB, zero = 1 << 20, c_size_t(0)

    class Properties(ctypes.Structure):
        _fields_ = [(n, ctypes.c_int) for n in ("handle", "allocation", "attribute")] + [
            ("device", ctypes.c_uint32), ("location", ctypes.c_int), ("reserved", c_uint64)]

    on_device = Properties(0, 0, 4, 0, 1, 0)          # huge pages of npu:0

    def memory(name):                                 # sizes are as wide as addresses
        return lambda *arguments: getattr(acl, f"aclrt{name}")(*map(c_void_p, arguments))

    unmap, free, release = map(memory, ("UnmapMem", "FreePhysical", "ReleaseMemAddress"))

    def reserve(size):
        out = c_void_p()
        assert acl.aclrtReserveMemAddress(byref(out), c_size_t(size), zero, None, c_uint64(1)) == 0
        return out.value

    def allocate(size):
        out = c_void_p()
        error = acl.aclrtMallocPhysical(byref(out), c_size_t(size), byref(on_device), c_uint64(0))
        return error or out.value

    def map_to(address, handle, size):
        return memory("MapMem")(address, size, 0, handle, 0)

    def fill(address, value, size, stream=None):
        return memory("MemsetAsync")(address, size, value, size, stream)

    def read(address, size):
        out, n = ctypes.create_string_buffer(size), c_size_t(size)
        assert acl.aclrtMemcpy(out, n, c_void_p(address), n, 2) == 0
        return out.raw

    def used():
        torch.npu.synchronize()
        return total - torch.npu.mem_get_info()[0]

    torch.npu.set_device(0)
    total = torch.npu.mem_get_info()[1]
"""


def test_memory_moves_between_addresses_that_stay(emulate):
    run = emulate(
        PAGES
        + """
    address, handles = reserve(8 * MIB), [allocate(2 * MIB), allocate(4 * MIB)]
    assert used() == 6 * MIB                          # addresses cost nothing
    assert map_to(address, handles[0], 2 * MIB) == map_to(
        address + 2 * MIB, handles[1], 4 * MIB) == 0
    assert fill(address, 7, 6 * MIB) == 0             # over both
    torch.npu.synchronize()
    assert read(address + 2 * MIB - 4, 8) == b"\\7" * 8
    assert unmap(address) == 0 and map_to(address + 6 * MIB, handles[0], 2 * MIB) == 0
    assert read(address + 6 * MIB, 4) == b"\\7" * 4    # the bytes went with the memory
    assert fill(address, 7, 4) == 107000              # nothing is there
    assert free(handles[0]) == 0 and used() == 6 * MIB            # it is mapped yet
    assert unmap(address + 6 * MIB) == 0 and used() == 4 * MIB
    assert unmap(address + 2 * MIB) == 0 and free(handles[1]) == 0 and used() == 0
    assert release(address) == 0 and reserve(4 * MIB) == address
    assert release(address) == 0
    granularity = c_size_t()
    for attribute, wanted in ((4, 2 * MIB), (10, 1 << 30)):
        properties = Properties(0, 0, attribute, 0, 1, 0)
        assert acl.aclrtMemGetAllocationGranularity(byref(properties), 0, byref(granularity)) == 0
        assert granularity.value == wanted
    """
    )
    assert len(run.report["errors"]) == 1 and "not mapped" in run.report["errors"][0]
    assert run.report["hazards"] == run.report["leaks"] == []
    assert run.report["counters"]["peak_memory_bytes"] == 6 << 20


def test_wrong_calls_are_refused_by_name(emulate):
    run = emulate(
        PAGES
        + """
    address, handle = reserve(8 * MIB), allocate(4 * MIB)
    assert map_to(address, handle, 2 * MIB) == 107000           # a part of it
    assert map_to(address + MIB, handle, 4 * MIB) == 107008     # between pages
    assert map_to(address, handle, 4 * MIB) == 0
    second = allocate(4 * MIB)
    assert map_to(address + 2 * MIB, second, 4 * MIB) == 107000           # over the first
    assert release(address) == 107000                           # still mapped
    assert acl.aclrtFree(c_void_p(address)) == 107000
    assert unmap(address) == free(handle) == 0
    assert free(handle) == 107000
    assert release(address) == 0 and release(address) == 107000
    assert allocate(total) == 207001                            # second holds some of it
    kept = reserve(2 * MIB)
    """
    )
    messages = (
        *("it has to be mapped as a whole", "not a multiple of 2 MiB"),
        *("mapping over addresses that are mapped", "that are mapped"),
        *("free of reserved addresses", "freed already", "not reserved, or released already"),
    )
    assert len(run.report["errors"]) == len(messages)
    for text, message in zip(run.report["errors"], messages):
        assert message in text
    assert [text.partition(": ")[2] for text in run.report["leaks"]] == [
        "npu:0 physical allocation #3 of 4194304 bytes",
        "reservation #4 of 2097152 addresses",
    ]


def test_hazards_are_found_at_mapped_addresses(emulate):
    run = emulate(
        PAGES
        + """
    address, handle = reserve(4 * MIB), allocate(2 * MIB)
    assert map_to(address, handle, 2 * MIB) == 0
    first, second = (torch.npu.Stream().npu_stream for _ in range(2))
    assert fill(address, 1, 64, first) == fill(address, 2, 64, second) == 0
    assert "write after write without an ordering edge" in sync_error()
    assert fill(address, 3, 64, first) == 0
    emulator.let_run()                                # and the host can't know
    assert unmap(address) == 0
    assert "freed while a stream may still use it" in sync_error()
    assert map_to(address + 2 * MIB, handle, 2 * MIB) == 0
    assert fill(address + 2 * MIB, 4, 64, second) == 0        # its history ended with the mapping
    assert sync_error() == ""
    x = torch.zeros(4, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):                      # a graph that outlives what it reads
        n = c_size_t(16)
        stream = c_void_p(torch.npu.current_stream().npu_stream)
        assert acl.aclrtMemcpyAsync(
            c_void_p(x.data_ptr()), n, c_void_p(address + 2 * MIB), n, 3, stream) == 0
    graph.replay()
    torch.npu.synchronize()
    assert unmap(address + 2 * MIB) == free(handle) == release(address) == 0
    graph.replay()
    error = sync_error()
    assert "touches memory that is not mapped" in error and "not reserved" in error, error
    """
    )
    assert len(run.report["hazards"]) == 2


def test_the_host_can_not_touch_mapped_memory_either(emulate):
    run = emulate(
        PAGES
        + """
    address, handle = reserve(4 * MIB), allocate(2 * MIB)
    assert map_to(address, handle, 2 * MIB) == 0
    ctypes.c_char.from_address(address + 5).value
    """,
        expect_code=128 + signal.SIGSEGV,
    )
    assert "the host touched device memory" in run.err
    assert "byte 5 of reservation #1 of 4194304 bytes, mapped to physical allocation #2" in run.err
