// The runtime's C interface for the other two libraries, HCCL and the launcher: what the runtime
// defines beside CANN's own functions, and those of CANN's that they call. The runtime includes it,
// too, so a definition that differs does not compile.
#pragma once

#include <cstddef>
#include <cstdint>

#define EMULATOR_API extern "C" __attribute__((visibility("default")))

struct emulator_access {  // bytes that a task reads or writes
  const char* begin;
  size_t size;
  bool write;
  bool by_block = false;  // the task says itself, while it runs, which of them: `emulator_touch`
};

// Tasks. `run(argument)` is called on the stream's worker, `destroy(argument)` after its last use.
// `kernel` is the name under which a collective is counted, `task` its name in messages.
EMULATOR_API int emulator_launch(void* stream, const char* name, void (*run)(void*),
                                 void (*destroy)(void*), void* argument,
                                 const emulator_access* accesses, size_t access_count);
EMULATOR_API int emulator_launch_collective(void* stream, const char* kernel, const char* task,
                                            void (*run)(void*), void (*destroy)(void*),
                                            void* argument, const emulator_access* accesses,
                                            size_t access_count);
EMULATOR_API int emulator_is_capturing(void* stream);
// Called while a task runs: it touches these bytes of what it was said to access by block. `alias` is
// where the host sees them. Without a running task nothing happens.
EMULATOR_API void emulator_touch(const void* alias, size_t size, int write);
EMULATOR_API void emulator_set_wait_hooks(void* (*release)(), void (*reacquire)(void*));
EMULATOR_API void emulator_count_hidden_copy(const char* name);
EMULATOR_API void emulator_count_sent(uint64_t bytes);  // to other ranks
// Around what stands for a device's work on the calling thread: a program's own host time leaves it
// out. Calls may be nested.
EMULATOR_API void emulator_enter();
EMULATOR_API void emulator_leave();

struct EmulatorInside {
  EmulatorInside() { emulator_enter(); }
  ~EmulatorInside() { emulator_leave(); }
};

// Memory: where the host sees it, and whether a range is within an allocation of a device.
EMULATOR_API void* emulator_alias(void* address);
EMULATOR_API int emulator_is_allocated(const void* address, size_t size);
// An object of the host that tasks access as they do device memory, and its name in messages.
EMULATOR_API void emulator_name_object(const void* address, const char* name);

// What went wrong: a kernel that failed, a call that is refused with a status.
EMULATOR_API void emulator_fault(const char* message);
EMULATOR_API int emulator_fault_is_pending();
EMULATOR_API int emulator_misuse(int status, const char* message);
EMULATOR_API int emulator_hang_seconds();

// Streams that collectives hold. `emulator_take_streams` holds them outside of graphs until they are
// given back. `emulator_note_communication` is to be called before an operation of `group` (any
// address that stands for it) is put onto a stream: if that stream is captured, the graph takes the
// group's streams (--hccl-streams) once and holds them until it is destroyed.
EMULATOR_API int emulator_take_streams(int device, int count, const char* wanted_for);
EMULATOR_API void emulator_give_streams(int device, int count);
EMULATOR_API int emulator_note_communication(void* stream, const void* group);

// CANN's.
EMULATOR_API int aclrtGetDevice(int32_t* device);
EMULATOR_API int aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t* logical);
EMULATOR_API int aclrtMallocAlign32(void** address, size_t size, int policy);
EMULATOR_API int aclrtFree(void* address);
EMULATOR_API int aclrtSynchronizeStream(void* stream);
EMULATOR_API const char* aclGetRecentErrMsg();
