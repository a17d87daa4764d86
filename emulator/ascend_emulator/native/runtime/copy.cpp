// Copies and fills. Direction and bounds are checked at the call, as far as the addresses tell.
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "abi.h"
#include "capture.h"
#include "device.h"
#include "memory.h"
#include "pinned.h"
#include "report.h"
#include "stream.h"

namespace emulator {
namespace {

struct Copy {
  void* to;
  const void* from;
  size_t size;
  bool to_device, from_device;

  char* to_bytes() const { return alias_of(to); }
  const char* from_bytes() const { return alias_of(from); }
};

const char* side(bool device) { return device ? "device" : "host"; }

void directions_of(int kind, Copy& copy) {
  copy.to_device = is_device(copy.to);
  copy.from_device = is_device(copy.from);
  if (kind == acl::kDefaultKind) return;
  copy.to_device = kind != acl::kHostToHost && kind != acl::kDeviceToHost;
  copy.from_device = kind != acl::kHostToHost && kind != acl::kHostToDevice;
}

aclError check_end(const void* address, size_t size, bool device, const char* end) {
  if (is_device(address) != device)
    return misuse(acl::kInvalidParameter, std::string("copy with the wrong direction: its ") + end +
                                              " should be on the " + side(device) + " and is on the " +
                                              side(!device) + " (" + describe_address(address) + ")");
  if (device && size && !is_within_allocation(address, size))
    return misuse(acl::kInvalidParameter, std::string("copy of ") + std::to_string(size) +
                                              " bytes out of bounds at its " + end + ": " +
                                              describe_address(address));
  return acl::kSuccess;
}

void count(const Copy& copy) {
  auto& c = counters();
  if (copy.to_device && copy.from_device) {
    ++c.d2d_copies;
    c.d2d_bytes += copy.size;
  } else if (copy.to_device) {
    ++c.h2d_copies;
    c.h2d_bytes += copy.size;
  } else if (copy.from_device) {
    ++c.d2h_copies;
    c.d2h_bytes += copy.size;
  }
}

aclError check(Copy& copy, size_t room, int kind) {
  directions_of(kind, copy);
  if (copy.size > room)
    return misuse(acl::kInvalidParameter, "copy of " + std::to_string(copy.size) +
                                              " bytes into a target of " + std::to_string(room));
  if (const auto error = check_end(copy.to, copy.size, copy.to_device, "target")) return error;
  if (const auto error = check_end(copy.from, copy.size, copy.from_device, "source")) return error;
  count(copy);
  return acl::kSuccess;
}

std::vector<Access> accesses_of(const Copy& copy) {
  std::vector<Access> out;
  if (copy.from_device) out.push_back({static_cast<const char*>(copy.from), copy.size, false});
  if (copy.to_device) out.push_back({static_cast<const char*>(copy.to), copy.size, true});
  return out;
}

Epoch epoch_of(const Actor& actor) { return {actor.id(), actor.clock().at(actor.id())}; }

// What is watched while copies between pinned memory and the device are under way; one entry per
// enqueued copy, or per enqueued replay of a captured one.
template <class Pending>
class Watches {
 public:
  void push(std::shared_ptr<Pending> pending) {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(pending));
  }
  std::shared_ptr<Pending> pop() {
    std::lock_guard lock(mutex_);
    auto front = queue_.front();
    queue_.pop_front();
    return front;
  }

 private:
  std::mutex mutex_;
  std::deque<std::shared_ptr<Pending>> queue_;
};

Task from_pinned(const Copy& copy, const std::string& stream) {
  auto watches = std::make_shared<Watches<PendingSource>>();
  Task task;
  task.on_enqueue = [=] { watches->push(watch_source(copy.from, copy.size, stream)); };
  task.run = [=](Actor& actor) {
    auto watch = watches->pop();
    deliver_targets_in(copy.from, copy.size);  // an earlier device-to-host copy may feed this one
    std::memcpy(copy.to_bytes(), copy.from_bytes(), copy.size);
    source_was_read(*watch, epoch_of(actor));
  };
  return task;
}

Task to_pinned(const Copy& copy) {
  auto watches = std::make_shared<Watches<PendingTarget>>();
  Task task;
  task.on_enqueue = [=] { watches->push(poison_target(copy.to, copy.size)); };
  task.run = [=](Actor& actor) {
    target_was_filled(*watches->pop(), copy.from_bytes(), epoch_of(actor));
  };
  return task;
}

// Pageable memory is staged: its bytes are taken at the call.
Task from_pageable(const Copy& copy) {
  ++counters().staged_copies;
  counters().staged_bytes += copy.size;
  const auto* from = static_cast<const char*>(copy.from);
  auto staged = std::make_shared<std::vector<char>>(from, from + copy.size);
  Task task;
  task.run = [=](Actor&) { std::memcpy(copy.to_bytes(), staged->data(), copy.size); };
  return task;
}

Task plain(const Copy& copy) {
  Task task;
  task.run = [=](Actor&) { std::memmove(copy.to_bytes(), copy.from_bytes(), copy.size); };
  return task;
}

aclError copy_async(Copy copy, size_t room, int kind, Stream& stream) {
  if (const auto error = check(copy, room, kind)) return error;
  Task task;
  if (copy.to_device && !copy.from_device)
    task = is_pinned(copy.from) ? from_pinned(copy, stream.label) : from_pageable(copy);
  else if (copy.from_device && !copy.to_device && is_pinned(copy.to))
    task = to_pinned(copy);
  else
    task = plain(copy);
  task.name = std::string(side(copy.from_device)) + "-to-" + side(copy.to_device) + " copy";
  task.accesses = accesses_of(copy);
  return enqueue(stream, std::move(task));
}

// The host itself is the actor of a synchronous copy: it relies on what it has waited for.
aclError copy_now(Copy copy, size_t room, int kind) {
  if (forbidden_by_capture())
    return misuse(acl::kNotAllowedInCapture, "synchronous copy during a capture");
  if (const auto error = check(copy, room, kind)) return error;
  const auto epoch = Host::instance().tick();
  check_accesses(accesses_of(copy), epoch, *Host::instance().snapshot(), "synchronous copy");
  std::memmove(copy.to_bytes(), copy.from_bytes(), copy.size);
  return take_fault();
}

aclError check_fill(const void* address, size_t room, size_t size) {
  if (size > room || !is_device(address) || !is_within_allocation(address, size))
    return misuse(acl::kInvalidParameter,
                  "fill of " + std::to_string(size) + " bytes out of bounds: " +
                      describe_address(address));
  return acl::kSuccess;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

ACL_API aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t size, int kind) {
  EMULATOR_DEVICE_CALL();
  return copy_now({to, from, size, false, false}, room, kind);
}

ACL_API aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t size, int kind,
                                  aclrtStream stream) {
  EMULATOR_STREAM_CALL(stream);
  return copy_async({to, from, size, false, false}, room, kind, stream_of(stream));
}

ACL_API aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t size,
                                               int kind, aclrtStream stream) {
  EMULATOR_STREAM_CALL(stream);
  return copy_async({to, from, size, false, false}, room, kind, stream_of(stream));
}

ACL_API aclError aclrtMemset(void* address, size_t room, int32_t value, size_t size) {
  EMULATOR_DEVICE_CALL();
  if (const auto error = check_fill(address, room, size)) return error;
  const auto epoch = Host::instance().tick();
  check_accesses({{static_cast<char*>(address), size, true}}, epoch, *Host::instance().snapshot(),
                 "synchronous fill");
  std::memset(alias_of(address), value, size);
  return acl::kSuccess;
}

ACL_API aclError aclrtMemsetAsync(void* address, size_t room, int32_t value, size_t size,
                                  aclrtStream stream) {
  EMULATOR_STREAM_CALL(stream);
  if (const auto error = check_fill(address, room, size)) return error;
  Task task;
  task.name = "fill";
  task.accesses = {{static_cast<char*>(address), size, true}};
  task.run = [=](Actor&) { std::memset(alias_of(address), value, size); };
  return enqueue(stream_of(stream), std::move(task));
}
