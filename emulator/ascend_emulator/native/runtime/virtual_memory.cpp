// Two arenas of addresses that are never used for anything else: one stays inaccessible, and
// programs get its addresses; the other lies at a fixed distance, and a physical allocation is mapped
// into it, so that the workers reach the bytes. Physical memory is a range of one sparse file.
//
// The rules are those of CANN's documentation of virtual memory management, and of the driver's
// interface (ascend_hal_base.h): pages of 2 MiB, a whole allocation mapped at once, one device in
// each reservation, unmapped before it is released. Memory that is freed while it is mapped is given
// back when it is unmapped.
#include "virtual_memory.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "abi.h"
#include "device.h"
#include "hazards.h"
#include "report.h"

namespace emulator {
namespace {

constexpr size_t kPage = size_t{2} << 20;
constexpr size_t kHugePage = size_t{1} << 30;
constexpr int kStale = 0xFF;  // NaN in every float type
constexpr size_t kLargestArena = size_t{1} << 44, kSmallestArena = size_t{1} << 36;

struct Physical {
  uint64_t serial;
  int device;
  size_t size;     // as asked for, which is what has to be mapped
  size_t pages;    // in bytes, what it takes of the device
  off_t offset;    // in the file
  bool pooled;     // by torch_npu's allocator
  int mapped = 0;  // how often
  bool freed = false, was_mapped = false;
};

struct Reservation {
  uint64_t serial;
  size_t size;
  bool pooled;
  std::map<size_t, Physical*> mappings;  // by offset from the arena's base
};

struct Virtual {
  std::mutex mutex;
  std::atomic<char*> base{nullptr};
  char* alias = nullptr;
  size_t size = 0;
  int file = -1;
  off_t end_of_file = 0;
  uint64_t serial = 0;
  std::map<size_t, Reservation> reservations;  // by offset from base
  std::map<Physical*, std::unique_ptr<Physical>> physical;
};

Virtual& memory() {
  static Virtual& instance = *new Virtual;
  return instance;
}

size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

void* inaccessible(void* at, size_t size) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
  void* out = mmap(at, size, PROT_NONE, flags, -1, 0);
  return out == MAP_FAILED ? nullptr : out;
}

bool reserve_arenas(Virtual& m) {
  if (m.base) return true;
  m.file = static_cast<int>(syscall(SYS_memfd_create, "npu-emulator-physical", 1u /* on exec */));
  if (m.file < 0) return false;
  for (size_t size = kLargestArena; size >= kSmallestArena; size /= 2) {
    void* base = inaccessible(nullptr, size);
    void* alias = base ? inaccessible(nullptr, size) : nullptr;
    if (alias) {
      m.alias = static_cast<char*>(alias);
      m.size = size;
      m.base = static_cast<char*>(base);
      return true;
    }
    if (base) munmap(base, size);
  }
  return false;
}

size_t offset_of(const Virtual& m, const void* address) {
  return static_cast<size_t>(static_cast<const char*>(address) - m.base.load());
}

// The entry whose range may hold the offset: the last that begins at or before it.
template <class Map>
auto at_or_before(Map& map, size_t offset) {
  auto it = map.upper_bound(offset);
  return it == map.begin() ? map.end() : std::prev(it);
}

Reservation* reservation_of(Virtual& m, size_t offset, size_t* begin) {
  auto it = at_or_before(m.reservations, offset);
  if (it == m.reservations.end() || offset >= it->first + it->second.size) return nullptr;
  *begin = it->first;
  return &it->second;
}

bool covers(Virtual& m, size_t offset, size_t size) {
  size_t begin;
  auto* reservation = reservation_of(m, offset, &begin);
  if (!reservation) return false;
  const size_t end = offset + size;
  auto it = at_or_before(reservation->mappings, offset);
  while (it != reservation->mappings.end() && it->first <= offset) {
    offset = it->first + it->second->size;
    if (offset >= end) return true;
    ++it;
  }
  return false;
}

std::string described(Virtual& m, const void* address) {
  const size_t offset = offset_of(m, address);
  size_t begin;
  auto* reservation = reservation_of(m, offset, &begin);
  char text[200];
  if (!reservation) {
    std::snprintf(text, sizeof text, "address %p, not reserved", address);
    return text;
  }
  auto it = at_or_before(reservation->mappings, offset);
  const bool mapped =
      it != reservation->mappings.end() && offset < it->first + it->second->size;
  std::snprintf(text, sizeof text, "address %p, byte %zu of reservation #%lu of %zu bytes, ", address,
                offset - begin, static_cast<unsigned long>(reservation->serial), reservation->size);
  if (!mapped) return std::string(text) + "not mapped";
  const auto* physical = it->second;
  return std::string(text) + "mapped to physical allocation #" + std::to_string(physical->serial) +
         " of npu:" + std::to_string(physical->device);
}

// What torch_npu holds ends with the process, as with its other memory; what the program asked for
// itself is a leak. Nothing but the caller tells them apart.
bool is_torch_npu(const void* caller) {
  Dl_info info;
  return dladdr(caller, &info) && info.dli_fname &&
         std::string(info.dli_fname).find("libtorch_npu") != std::string::npos;
}

aclError invalid(const std::string& message) { return misuse(acl::kInvalidParameter, message); }

aclError reserve_address(void** out, size_t size, size_t alignment, void* wanted, uint64_t flags,
                         bool pooled) {
  if (!out || !size) return invalid("reservation of no addresses");
  if (alignment || flags > 1) return invalid("reservation with an alignment or unknown flags");
  if (wanted) return misuse(acl::kNotSupported, "reservation at an address of the program's choice");
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  if (!reserve_arenas(m)) return fail(acl::kOutOfMemory, "the host has no addresses to reserve");
  const size_t bytes = rounded(size, kPage);
  size_t at = 0;
  for (const auto& [begin, reservation] : m.reservations) {  // first fit, a free page after each
    if (begin - at >= bytes + kPage) break;
    at = begin + reservation.size + kPage;
  }
  if (at + bytes > m.size)
    return fail(acl::kOutOfMemory, "no room for " + std::to_string(size) + " addresses");
  m.reservations[at] = {++m.serial, bytes, pooled, {}};
  *out = m.base + at;
  return acl::kSuccess;
}

aclError release_address(void* address) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto it = is_virtual(address) ? m.reservations.find(offset_of(m, address)) : m.reservations.end();
  if (it == m.reservations.end())
    return invalid("release of addresses that are not reserved, or released already");
  if (!it->second.mappings.empty())
    return invalid("release of addresses that are mapped: " + described(m, address) +
                   "; unmap them first");
  m.reservations.erase(it);
  return acl::kSuccess;
}

bool is_1g(int attribute) {
  return attribute == acl::kHbmHuge1G || attribute == acl::kHbmP2pHuge1G ||
         attribute == acl::kMemHuge1G || attribute == acl::kMemP2pHuge1G;
}

aclError check_properties(const acl::PhysicalProperties* properties) {
  if (!properties || properties->handle_type || properties->allocation_type)
    return invalid("physical memory with an unknown kind of handle or allocation");
  if (properties->location.type != acl::kLocationDevice)
    return misuse(acl::kNotSupported, "physical memory of the host is not emulated");
  if (static_cast<int>(properties->location.id) >= device_count())
    return misuse(acl::kInvalidDevice, "physical memory of a device that does not exist");
  return acl::kSuccess;
}

aclError allocate_physical(void** out, size_t size, const acl::PhysicalProperties* properties,
                           uint64_t flags, bool pooled) {
  if (!out || !size || flags) return invalid("physical memory of no size, or with flags");
  if (const auto error = check_properties(properties)) return error;
  const int device = static_cast<int>(properties->location.id);
  const size_t pages = rounded(size, is_1g(properties->attribute) ? kHugePage : kPage);
  if (const auto error = take_memory(device, pages)) return error;
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  if (!reserve_arenas(m) || ftruncate(m.file, m.end_of_file + static_cast<off_t>(pages))) {
    give_memory(device, pages);
    return fail(acl::kOutOfMemory, "the host can't provide physical memory");
  }
  auto physical = std::make_unique<Physical>(
      Physical{++m.serial, device, size, pages, m.end_of_file, pooled});
  m.end_of_file += static_cast<off_t>(pages);  // never used again: the file is sparse
  *out = physical.get();
  m.physical[physical.get()] = std::move(physical);
  return acl::kSuccess;
}

void give_back(Virtual& m, Physical* physical) {
  fallocate(m.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, physical->offset,
            static_cast<off_t>(physical->pages));
  give_memory(physical->device, physical->pages);
  m.physical.erase(physical);
}

Physical* find(Virtual& m, void* handle) {
  auto it = m.physical.find(static_cast<Physical*>(handle));
  return it == m.physical.end() || it->second->freed ? nullptr : it->first;
}

aclError free_physical(void* handle) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto* physical = find(m, handle);
  if (!physical) return invalid("free of physical memory that is unknown, or freed already");
  physical->freed = true;
  if (!physical->mapped) give_back(m, physical);
  return acl::kSuccess;
}

aclError map(void* address, size_t size, size_t file_offset, void* handle, uint64_t flags) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto* physical = find(m, handle);
  if (!physical) return invalid("mapping of physical memory that is unknown, or freed already");
  if (file_offset || flags) return invalid("mapping with an offset or flags");
  if (size != physical->size || size % kPage)
    return invalid("mapping of " + std::to_string(size) + " bytes of physical allocation #" +
                   std::to_string(physical->serial) + " of " + std::to_string(physical->size) +
                   "; it has to be mapped as a whole, in pages of 2 MiB");
  size_t begin = 0;
  const size_t offset = is_virtual(address) ? offset_of(m, address) : 0;
  auto* reservation = is_virtual(address) ? reservation_of(m, offset, &begin) : nullptr;
  if (!reservation || offset + size > begin + reservation->size)
    return invalid("mapping outside of reserved addresses");
  if (offset % kPage) return misuse(acl::kUnaligned, "mapping at " + described(m, address) +
                                                         ", which is not a multiple of 2 MiB");
  auto next = reservation->mappings.lower_bound(offset);
  const auto before = at_or_before(reservation->mappings, offset);
  if ((next != reservation->mappings.end() && next->first < offset + size) ||
      (before != reservation->mappings.end() && before->first + before->second->size > offset))
    return invalid("mapping over addresses that are mapped: " + described(m, address));
  for (const auto& [where, other] : reservation->mappings)
    if (other->device != physical->device)
      return invalid("mapping of memory of npu:" + std::to_string(physical->device) +
                     " into addresses that hold memory of npu:" + std::to_string(other->device));
  if (mmap(m.alias + offset, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
           m.file, physical->offset) == MAP_FAILED)
    return fail(acl::kOutOfMemory, "the host can't map memory");
  // A card's memory holds what was there before. torch_npu's own comes and goes too often for this.
  if (!physical->pooled && !physical->was_mapped) std::memset(m.alias + offset, kStale, size);
  reservation->mappings[offset] = physical;
  physical->was_mapped = true;
  ++physical->mapped;
  return acl::kSuccess;
}

aclError unmap(void* address) {
  auto& m = memory();
  size_t size = 0;
  {
    std::lock_guard lock(m.mutex);
    size_t begin;
    auto* reservation =
        is_virtual(address) ? reservation_of(m, offset_of(m, address), &begin) : nullptr;
    const auto it = reservation ? reservation->mappings.find(offset_of(m, address))
                                : std::map<size_t, Physical*>::iterator{};
    if (!reservation || it == reservation->mappings.end())
      return invalid("unmapping of addresses where no mapping begins");
    size = it->second->size;
  }
  forget_range(static_cast<char*>(address), size, true);
  std::lock_guard lock(m.mutex);
  const size_t offset = offset_of(m, address);
  size_t begin;
  auto* reservation = reservation_of(m, offset, &begin);
  auto* physical = reservation->mappings[offset];
  reservation->mappings.erase(offset);
  inaccessible(m.alias + offset, size);
  if (--physical->mapped == 0 && physical->freed) give_back(m, physical);
  return acl::kSuccess;
}

}  // namespace

bool is_virtual(const void* address) {
  const auto& m = memory();
  const char* base = m.base.load(std::memory_order_acquire);
  const auto* at = static_cast<const char*>(address);
  return base && at >= base && at < base + m.size;
}

bool is_virtual_alias(const void* address) {
  const auto& m = memory();
  const auto* at = static_cast<const char*>(address);
  return m.base.load(std::memory_order_acquire) && at >= m.alias && at < m.alias + m.size;
}

char* virtual_alias(const void* address) {
  return memory().alias + offset_of(memory(), address);
}

const char* virtual_address_of(const void* alias) {
  return memory().base.load() + (static_cast<const char*>(alias) - memory().alias);
}

bool is_mapped(const void* address, size_t size) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  return covers(m, offset_of(m, address), size);
}

int virtual_device(const void* address) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  size_t begin;
  auto* reservation = reservation_of(m, offset_of(m, address), &begin);
  if (!reservation || reservation->mappings.empty()) return 0;
  return reservation->mappings.begin()->second->device;
}

std::string describe_virtual(const void* address, bool wait) {
  auto& m = memory();
  std::unique_lock lock(m.mutex, std::defer_lock);
  if (wait) lock.lock();
  else if (!lock.try_lock()) return "a reserved address";
  return described(m, address);
}

void add_held_physical(Held& held) {
  auto& m = memory();
  std::unique_lock lock(m.mutex, std::try_to_lock);
  if (!lock) return;
  for (const auto& [physical, owned] : m.physical) {
    if (physical->pooled) {
      ++held.pooled_blocks;
      held.pooled_bytes += physical->pages;
    } else {
      held.leaks.push_back("npu:" + std::to_string(physical->device) + " physical allocation #" +
                           std::to_string(physical->serial) + " of " +
                           std::to_string(physical->pages) + " bytes" +
                           (physical->mapped ? ", still mapped" : ""));
    }
  }
  for (const auto& [offset, reservation] : m.reservations)
    if (!reservation.pooled)
      held.leaks.push_back("reservation #" + std::to_string(reservation.serial) + " of " +
                           std::to_string(reservation.size) + " addresses");
}

}  // namespace emulator

using namespace emulator;

ACL_API aclError aclrtReserveMemAddress(void** out, size_t size, size_t alignment, void* wanted,
                                        uint64_t flags) {
  EMULATOR_CALL();
  const bool pooled = is_torch_npu(__builtin_return_address(0));
  return reserve_address(out, size, alignment, wanted, flags, pooled);
}

ACL_API aclError aclrtReleaseMemAddress(void* address) {
  EMULATOR_CALL();
  return release_address(address);
}

ACL_API aclError aclrtMallocPhysical(void** out, size_t size,
                                     const acl::PhysicalProperties* properties, uint64_t flags) {
  EMULATOR_CALL();
  const bool pooled = is_torch_npu(__builtin_return_address(0));
  return allocate_physical(out, size, properties, flags, pooled);
}

ACL_API aclError aclrtFreePhysical(void* handle) {
  EMULATOR_CALL();
  return free_physical(handle);
}

ACL_API aclError aclrtMapMem(void* address, size_t size, size_t offset, void* handle,
                             uint64_t flags) {
  EMULATOR_CALL();
  return map(address, size, offset, handle, flags);
}

ACL_API aclError aclrtUnmapMem(void* address) {
  EMULATOR_CALL();
  return unmap(address);
}

ACL_API aclError aclrtMemGetAllocationGranularity(acl::PhysicalProperties* properties, int,
                                                  size_t* granularity) {
  EMULATOR_CALL();
  if (const auto error = check_properties(properties)) return error;
  *granularity = is_1g(properties->attribute) ? kHugePage : kPage;
  return acl::kSuccess;
}
