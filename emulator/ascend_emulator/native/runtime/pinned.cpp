// Both kinds of mistake are found whatever the timing: a rewritten source by comparing its bytes
// when the host learns that the copy is complete, an early read of a target because the bytes are
// delivered only then. A source rewritten with the same bytes can't be seen.
#include "pinned.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>

#include "abi.h"
#include "device.h"
#include "memory.h"
#include "report.h"

namespace emulator {
namespace {

constexpr unsigned char kPoison = 0xCB;

struct Pinned {
  std::mutex mutex;
  std::map<const char*, size_t> allocations;
  std::list<std::shared_ptr<PendingSource>> sources;
  std::list<std::shared_ptr<PendingTarget>> targets;
};

Pinned& pinned() {
  static Pinned& instance = *new Pinned;
  return instance;
}

bool overlap(const void* a, size_t a_size, const void* b, size_t b_size) {
  const auto* x = static_cast<const char*>(a);
  const auto* y = static_cast<const char*>(b);
  return x < y + b_size && y < x + a_size;
}

void check_source(const PendingSource& source) {
  if (!std::memcmp(source.begin, source.bytes.data(), source.bytes.size())) return;
  hazard("pinned source of " + std::to_string(source.bytes.size()) + " bytes, copied on " +
         source.stream + ", was rewritten before the host knew that the copy was complete");
}

void deliver(const PendingTarget& target) {
  // Copies that have read the range before are no longer the host's concern: the device rewrites it.
  pinned().sources.remove_if([&](auto& s) {
    return s->ran && overlap(s->begin, s->bytes.size(), target.begin, target.bytes.size());
  });
  std::memcpy(target.begin, target.bytes.data(), target.bytes.size());
}

aclError allocate_host(void** out, size_t size) {
  if (posix_memalign(out, 4096, std::max<size_t>(size, 1)))
    return fail(acl::kOutOfMemory, "out of host memory");
  auto& p = pinned();
  std::lock_guard lock(p.mutex);
  p.allocations[static_cast<char*>(*out)] = size;
  return acl::kSuccess;
}

bool forget_pending_in(const char* begin, size_t size) {
  auto& p = pinned();
  const auto before = p.sources.size() + p.targets.size();
  p.sources.remove_if([&](auto& s) { return overlap(s->begin, s->bytes.size(), begin, size); });
  p.targets.remove_if([&](auto& t) { return overlap(t->begin, t->bytes.size(), begin, size); });
  return p.sources.size() + p.targets.size() != before;
}

}  // namespace

bool is_pinned(const void* address) {
  auto& p = pinned();
  const auto* at = static_cast<const char*>(address);
  std::lock_guard lock(p.mutex);
  auto it = p.allocations.upper_bound(at);
  if (it == p.allocations.begin()) return false;
  --it;
  return at < it->first + std::max<size_t>(it->second, 1);
}

std::shared_ptr<PendingSource> watch_source(const void* begin, size_t size, std::string stream) {
  const auto* at = static_cast<const char*>(begin);
  auto source = std::make_shared<PendingSource>();
  source->begin = at;
  source->bytes.assign(at, at + size);
  source->stream = std::move(stream);
  auto& p = pinned();
  std::lock_guard lock(p.mutex);
  source->is_fed = std::any_of(p.targets.begin(), p.targets.end(), [&](auto& t) {
    return overlap(t->begin, t->bytes.size(), begin, size);
  });
  p.sources.push_back(source);
  return source;
}

std::shared_ptr<PendingTarget> poison_target(void* begin, size_t size) {
  auto target = std::make_shared<PendingTarget>();
  target->begin = static_cast<char*>(begin);
  target->bytes.resize(size);
  auto& p = pinned();
  std::lock_guard lock(p.mutex);
  // An earlier copy on the same stream may still have to read these bytes.
  const bool is_source = std::any_of(p.sources.begin(), p.sources.end(), [&](auto& s) {
    return overlap(s->begin, s->bytes.size(), begin, size);
  });
  if (!is_source) std::memset(begin, kPoison, size);
  p.targets.push_back(target);
  return target;
}

void source_was_read(PendingSource& source, const Epoch& epoch) {
  std::lock_guard lock(pinned().mutex);
  if (source.is_fed) std::memcpy(source.bytes.data(), source.begin, source.bytes.size());
  source.done = epoch;
  source.ran = true;
}

void target_was_filled(PendingTarget& target, const char* bytes, const Epoch& epoch) {
  std::lock_guard lock(pinned().mutex);
  std::memcpy(target.bytes.data(), bytes, target.bytes.size());
  target.done = epoch;
  target.ran = true;
}

void deliver_targets_in(const void* begin, size_t size) {
  auto& p = pinned();
  std::lock_guard lock(p.mutex);
  p.targets.remove_if([&](auto& t) {
    if (!t->ran || !overlap(t->begin, t->bytes.size(), begin, size)) return false;
    deliver(*t);
    return true;
  });
}

void deliver_all_targets() {
  auto& p = pinned();
  std::lock_guard lock(p.mutex);
  p.targets.remove_if([](auto& t) {
    if (t->ran) deliver(*t);
    return t->ran;
  });
}

void settle_pending_copies() {
  auto& p = pinned();
  const auto known = Host::instance().snapshot();
  std::lock_guard lock(p.mutex);
  p.sources.remove_if([&](auto& s) {
    if (!s->ran || !known->covers(s->done)) return false;
    check_source(*s);
    return true;
  });
  p.targets.remove_if([&](auto& t) {
    if (!t->ran || !known->covers(t->done)) return false;
    deliver(*t);
    return true;
  });
}

}  // namespace emulator

using namespace emulator;

ACL_API aclError aclrtMallocHost(void** out, size_t size) {
  EMULATOR_DEVICE_CALL();
  return allocate_host(out, size);
}

ACL_API aclError aclrtMallocHostWithCfg(void** out, uint64_t size, void* /*configuration*/) {
  EMULATOR_DEVICE_CALL();
  return allocate_host(out, size);
}

ACL_API aclError aclrtFreeHost(void* address) {
  EMULATOR_CALL();
  auto& p = pinned();
  bool in_use;
  {
    std::lock_guard lock(p.mutex);
    auto it = p.allocations.find(static_cast<char*>(address));
    if (it == p.allocations.end())
      return misuse(acl::kInvalidParameter, "free of host memory that was not allocated as pinned");
    in_use = forget_pending_in(it->first, it->second);
    p.allocations.erase(it);
  }
  if (in_use) hazard("pinned memory freed before the host knew that a copy of it was complete");
  std::free(address);
  return acl::kSuccess;
}

ACL_API aclError aclrtPointerGetAttributes(const void* address, acl::PointerAttributes* out) {
  EMULATOR_CALL();
  std::memset(out, 0, sizeof *out);
  out->location.type = acl::kLocationUnregistered;
  if (is_pinned(address)) out->location.type = acl::kLocationHost;
  if (is_device(address)) {
    out->location.type = acl::kLocationDevice;
    out->location.id = static_cast<uint32_t>(device_of(address));
  }
  return acl::kSuccess;
}
