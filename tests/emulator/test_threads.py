"""Which calls need a device that is set in their thread."""

import pytest


def test_calls_on_a_thread_without_a_device_are_refused(emulate):
    run = emulate(
        """
        import threading
        assert acl.aclInit(None) == 0                 # without a default device
        out, n = ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4096)
        refused = {
            "stream": lambda: acl.aclrtCreateStream(out),
            "event": lambda: acl.aclrtCreateEventExWithFlag(out, 0),
            "memory": lambda: acl.aclrtMalloc(out, n, 0),
            "pinned memory": lambda: acl.aclrtMallocHost(out, n),
            "sync": lambda: acl.aclrtSynchronizeDevice(),
            "device": lambda: acl.aclrtGetDevice(out),
        }
        for call in refused.values():
            assert call() == 107002
        assert acl.aclrtSetDevice(0) == 0
        event, memory = ctypes.c_void_p(), malloc(4096)
        assert acl.aclrtCreateEventExWithFlag(ctypes.byref(event), 0) == 0
        allowed = {
            "wait for an event": lambda: acl.aclrtSynchronizeEvent(event),
            "destroy an event": lambda: acl.aclrtDestroyEvent(event),
            "free": lambda: acl.aclrtFree(memory),
            "set": lambda: acl.aclrtSetDevice(0) or acl.aclrtCreateStream(out),
        }
        answers = {}

        def other_thread():
            answers.update((name, call()) for name, call in (refused | allowed).items())

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert answers == dict.fromkeys(refused, 107002) | dict.fromkeys(allowed, 0), answers
        """
    )
    assert "aclrtCreateStream on a thread that set no device" in run.report["errors"][0]


@pytest.mark.parametrize("sets_it", [True, False])
def test_a_thread_that_forgets_its_device_is_a_hazard(emulate, sets_it):
    """A rank's thread that forgets `set_device` allocates on npu:0, whatever its rank is."""
    run = emulate(
        f"""
        import threading
        torch.npu.set_device(1)
        x = torch.ones(4, device="npu")
        stream, answers = ctypes.c_void_p(torch.npu.default_stream(1).npu_stream), []

        def other_thread():
            if {sets_it}:
                torch.npu.set_device(1)
            event = ctypes.c_void_p()
            answers.append(acl.aclrtCreateEventExWithFlag(ctypes.byref(event), 0))
            answers.append(acl.aclrtRecordEvent(event, stream))

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert answers == [0, 0 if {sets_it} else 107003], answers
        """,
        devices=2,
        hazards="warn",
    )
    hazard = (
        "on a thread that set no device works on npu:0, the default, in a process that set npu:1"
    )
    assert [hazard in text for text in run.report["hazards"]] == ([] if sets_it else [True])
    assert len(run.report["errors"]) == (0 if sets_it else 1)
