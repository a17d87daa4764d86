// One reservation holds every device's memory twice: once inaccessible, whose addresses programs
// get, and once as a shared mapping that the workers use. A host access to the first faults.
#include "memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "abi.h"
#include "device.h"
#include "hazards.h"
#include "options.h"
#include "report.h"
#include "virtual_memory.h"

namespace emulator {
namespace {

constexpr size_t kAlignment = 512;  // what the devices promise

// Never handed out, after each allocation: an access past the end can't hit the next one.
constexpr size_t kGuardBytes = 512;

struct Allocation {
  size_t size;
  uint64_t serial;
  bool pooled;  // by torch_npu's allocators, for tensors and graphs that end with the process
};

struct Memory {
  std::mutex mutex;
  char* base = nullptr;
  char* alias = nullptr;
  size_t capacity = 0;  // of one device
  size_t total = 0;     // of all devices
  int file = -1;
  uint64_t serial = 0;
  std::map<size_t, Allocation> allocations;  // by offset from base
  std::vector<size_t> used;                  // by device
  struct sigaction previous_handler {};
};

Memory& memory() {
  static Memory& instance = *new Memory;
  return instance;
}

std::string described(const Memory& m, const void* address) {
  const size_t offset = static_cast<const char*>(address) - m.base;
  char text[200];
  auto it = m.allocations.upper_bound(offset);
  if (it != m.allocations.begin()) {
    --it;
    const size_t into = offset - it->first;
    const bool inside = into < it->second.size;
    std::snprintf(text, sizeof text, "npu:%zu address %p, byte %zu %s allocation #%lu of %zu bytes",
                  offset / m.capacity, address, into, inside ? "of" : "counted from the start of",
                  static_cast<unsigned long>(it->second.serial), it->second.size);
  } else {
    std::snprintf(text, sizeof text, "npu:%zu address %p, not allocated", offset / m.capacity,
                  address);
  }
  return text;
}

// A fault ends the process anyway, so taking a lock and allocating here risks only how it ends.
void on_fault(int signal, siginfo_t* info, void*) {
  auto& m = memory();
  if (is_virtual_alias(info->si_addr)) {
    say("FATAL: a kernel touched memory that is not mapped: %s",
        describe_virtual(virtual_address_of(info->si_addr), false).c_str());
    hazard("a kernel touched memory that is not mapped");
    write_report(true);
  } else if (is_virtual(info->si_addr)) {
    say("FATAL: the host touched device memory: %s. Copy it to the host first.",
        describe_virtual(info->si_addr, false).c_str());
    hazard("the host touched device memory");
    write_report(true);
  } else if (is_device(info->si_addr)) {
    const bool locked = m.mutex.try_lock();
    say("FATAL: the host touched device memory: %s. Copy it to the host first.",
        described(m, info->si_addr).c_str());
    if (locked) m.mutex.unlock();
    hazard("the host touched device memory");
    write_report(true);
  }
  sigaction(signal, &m.previous_handler, nullptr);  // the access faults again, and is not ours now
}

void install_fault_handler(Memory& m) {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &m.previous_handler);
}

bool reserve(Memory& m) {
  if (m.base) return true;
  m.capacity = options().memory_bytes;
  m.total = m.capacity * options().devices;
  m.used.assign(options().devices, 0);
  m.file = static_cast<int>(syscall(SYS_memfd_create, "npu-emulator", 1u /* close on exec */));
  if (m.file < 0 || ftruncate(m.file, static_cast<off_t>(m.total))) return false;
  void* base = mmap(nullptr, m.total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* alias = mmap(nullptr, m.total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, m.file, 0);
  if (base == MAP_FAILED || alias == MAP_FAILED) return false;
  m.base = static_cast<char*>(base);
  m.alias = static_cast<char*>(alias);
  install_fault_handler(m);
  install_exit_report();
  return true;
}

// First fit; the caching allocator above asks for few and large pieces.
bool find_room(const Memory& m, int device, size_t size, size_t* offset) {
  const size_t end = m.capacity * (device + 1);
  size_t at = m.capacity * device;
  for (auto it = m.allocations.lower_bound(at); it != m.allocations.end(); ++it) {
    if (it->first >= end || it->first - at >= size + kGuardBytes) break;
    at = it->first + it->second.size + kGuardBytes;
  }
  *offset = at;
  return at + size <= end;
}

aclError out_of_memory(const Memory& m, int device, size_t size) {
  return fail(acl::kOutOfMemory, "npu:" + std::to_string(device) + " has " +
                                     std::to_string(m.capacity - m.used[device]) +
                                     " bytes left, " + std::to_string(size) + " wanted");
}

void use(Memory& m, int device, size_t size) {
  m.used[device] += size;
  auto& peak = counters().peak_memory_bytes;
  if (m.used[device] > peak) peak = m.used[device];
}

aclError allocate(void** out, size_t size, bool pooled) {
  const int device = current_device();
  if (!out || !size) return misuse(acl::kInvalidParameter, "allocation of nothing");
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  if (!reserve(m)) return fail(acl::kOutOfMemory, "the host can't reserve the devices' memory");
  size = (size + kAlignment - 1) / kAlignment * kAlignment;
  size_t offset;
  if (m.used[device] + size > m.capacity || !find_room(m, device, size, &offset))
    return out_of_memory(m, device, size);
  m.allocations[offset] = {size, ++m.serial, pooled};
  use(m, device, size);
  *out = m.base + offset;
  return acl::kSuccess;
}

aclError check_free(const Memory& m, const void* address) {
  if (!is_device(address))
    return misuse(acl::kInvalidParameter, "free of an address that is not device memory");
  if (is_virtual(address))
    return misuse(acl::kInvalidParameter, "free of reserved addresses, which are unmapped: " +
                                              describe_virtual(address, true));
  const size_t offset = static_cast<const char*>(address) - m.base;
  if (m.allocations.count(offset)) return acl::kSuccess;
  auto it = m.allocations.upper_bound(offset);
  const bool inside = it != m.allocations.begin() &&
                      offset < std::prev(it)->first + std::prev(it)->second.size;
  return misuse(acl::kInvalidParameter,
                inside ? "free inside an allocation: " + described(m, address)
                       : "double free, or free of what was never allocated: " + described(m, address));
}

aclError release(void* address) {
  auto& m = memory();
  size_t size;
  {
    std::lock_guard lock(m.mutex);
    if (const auto error = check_free(m, address)) return error;
    size = m.allocations[static_cast<char*>(address) - m.base].size;
  }
  forget_range(static_cast<char*>(address), size, true);
  std::lock_guard lock(m.mutex);
  const size_t offset = static_cast<char*>(address) - m.base;
  fallocate(m.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(size));
  m.used[offset / m.capacity] -= size;
  m.allocations.erase(offset);
  return acl::kSuccess;
}

}  // namespace

bool is_device(const void* address) {
  const auto& m = memory();
  const auto* at = static_cast<const char*>(address);
  return (m.base && at >= m.base && at < m.base + m.total) || is_virtual(address);
}

int device_of(const void* address) {
  if (is_virtual(address)) return virtual_device(address);
  const auto& m = memory();
  return static_cast<int>((static_cast<const char*>(address) - m.base) / m.capacity);
}

char* alias_of(const void* address) {
  if (is_virtual(address)) return virtual_alias(address);
  auto* at = static_cast<char*>(const_cast<void*>(address));
  return is_device(at) ? memory().alias + (at - memory().base) : at;
}

bool is_alias(const void* address) {
  const auto& m = memory();
  const auto* at = static_cast<const char*>(address);
  return (m.alias && at >= m.alias && at < m.alias + m.total) || is_virtual_alias(address);
}

const char* address_of_alias(const void* alias) {
  if (is_virtual_alias(alias)) return virtual_address_of(alias);
  const auto& m = memory();
  return m.base + (static_cast<const char*>(alias) - m.alias);
}

bool is_within_allocation(const void* address, size_t size) {
  if (is_virtual(address)) return is_mapped(address, size);
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  const size_t offset = static_cast<const char*>(address) - m.base;
  auto it = m.allocations.upper_bound(offset);
  if (it == m.allocations.begin()) return false;
  --it;
  return offset + size <= it->first + it->second.size;
}

std::string describe_address(const void* address) {
  auto& m = memory();
  if (!is_device(address)) {
    if (const auto name = name_of_object(address); !name.empty()) return name;
    char text[40];
    std::snprintf(text, sizeof text, "host address %p", address);
    return text;
  }
  if (is_virtual(address)) return describe_virtual(address, true);
  std::lock_guard lock(m.mutex);
  return described(m, address);
}

aclError take_memory(int device, size_t size) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  if (!reserve(m)) return fail(acl::kOutOfMemory, "the host can't reserve the devices' memory");
  if (m.used[device] + size > m.capacity) return out_of_memory(m, device, size);
  use(m, device, size);
  return acl::kSuccess;
}

void give_memory(int device, size_t size) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  m.used[device] -= size;
}

Held held_memory() {
  auto& m = memory();
  std::unique_lock lock(m.mutex, std::try_to_lock);
  Held out;
  if (!lock) return out;
  for (const auto& [offset, allocation] : m.allocations) {
    if (allocation.pooled) {
      ++out.pooled_blocks;
      out.pooled_bytes += allocation.size;
      continue;
    }
    out.leaks.push_back("npu:" + std::to_string(offset / m.capacity) + " allocation #" +
                  std::to_string(allocation.serial) + " of " + std::to_string(allocation.size) +
                  " bytes");
  }
  add_held_physical(out);
  return out;
}

}  // namespace emulator

using namespace emulator;

ACL_API aclError aclrtMalloc(void** address, size_t size, int /*policy*/) {
  EMULATOR_DEVICE_CALL();
  return allocate(address, size, false);
}

// What torch_npu's allocators call, and nobody else.
ACL_API aclError aclrtMallocAlign32(void** address, size_t size, int /*policy*/) {
  EMULATOR_DEVICE_CALL();
  return allocate(address, size, true);
}

ACL_API aclError aclrtFree(void* address) {
  EMULATOR_CALL();
  return release(address);
}

ACL_API aclError aclrtGetMemInfo(int /*kind*/, size_t* free_bytes, size_t* total_bytes) {
  EMULATOR_DEVICE_CALL();
  const int device = current_device();
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  if (!reserve(m)) return fail(acl::kOutOfMemory, "the host can't reserve the devices' memory");
  *total_bytes = m.capacity;
  *free_bytes = m.capacity - m.used[device];
  return acl::kSuccess;
}

// For the launcher and for references that must tell host tensors from device tensors.
ACL_API void* emulator_alias(void* address) { return alias_of(address); }
ACL_API int emulator_is_alias(const void* address) { return is_alias(address); }
