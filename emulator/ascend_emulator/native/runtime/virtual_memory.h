// Reserved addresses, and physical memory that is mapped to them: what expandable segments use.
#pragma once

#include <cstddef>
#include <string>

#include "memory.h"

namespace emulator {

// Whether an address belongs to a reservation's arena, mapped or not.
bool is_virtual(const void* address);
bool is_virtual_alias(const void* address);
char* virtual_alias(const void* address);
const char* virtual_address_of(const void* alias);

// Whether physical memory is mapped to all of [address, address + size).
bool is_mapped(const void* address, size_t size);
int virtual_device(const void* address);

// `wait` is false in the fault handler, where another thread may hold the lock for good.
std::string describe_virtual(const void* address, bool wait);

void add_held_physical(Held& held);

}  // namespace emulator
