// Device memory: addresses the host can't touch, and an alias of the same bytes for the workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "abi.h"

namespace emulator {

bool is_device(const void* address);
int device_of(const void* address);

// Where workers find the bytes of a device address; host addresses are returned as they are.
char* alias_of(const void* address);
bool is_alias(const void* address);
const char* address_of_alias(const void* alias);  // the reverse of alias_of

// Whether [address, address + size) lies within one allocation, or is mapped.
bool is_within_allocation(const void* address, size_t size);

std::string describe_address(const void* address);
std::string name_of_object(const void* address);  // see hooks.cpp; empty if it has none

// Memory that is allocated now: what the program has to free itself, a line each, and what
// torch_npu's allocators keep for tensors and graphs.
struct Held {
  std::vector<std::string> leaks;
  uint64_t pooled_blocks = 0, pooled_bytes = 0;
};
Held held_memory();

// Counts bytes of a device's memory as used: 207001 if fewer are left.
aclError take_memory(int device, size_t size);
void give_memory(int device, size_t size);

}  // namespace emulator
