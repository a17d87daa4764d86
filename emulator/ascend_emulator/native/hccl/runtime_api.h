// What HCCL uses of the emulated runtime, a library of its own (see runtime/hooks.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
struct emulator_access {  // the layout of emulator::Access
  const char* begin;
  size_t size;
  bool write;
};
void* emulator_alias(void* address);
void emulator_fault(const char* message);
int emulator_fault_is_pending();
int emulator_is_allocated(const void* address, size_t size);
int emulator_is_capturing(void* stream);
int emulator_launch_collective(void* stream, const char* kernel, const char* task,
                               void (*run)(void*), void (*destroy)(void*), void* argument,
                               const emulator_access* accesses, size_t access_count);
int emulator_note_communication(void* stream, const void* group);
int emulator_take_streams(int device, int count, const char* wanted_for);
void emulator_give_streams(int device, int count);
int emulator_misuse(int status, const char* message);
int emulator_hang_seconds();
void emulator_name_object(const void* address, const char* name);
int aclrtGetDevice(int32_t* device);
int aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t* logical);
int aclrtMallocAlign32(void** address, size_t size, int policy);
int aclrtFree(void* address);
}
