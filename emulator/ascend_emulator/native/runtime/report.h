// What happened: calls, counters, errors, hazards, and the fault that the next sync returns.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "abi.h"

namespace emulator {

// The order is part of the Python interface (emulator/api.py).
struct Counters {
  std::atomic<uint64_t> h2d_copies{0}, h2d_bytes{0};
  std::atomic<uint64_t> d2h_copies{0}, d2h_bytes{0};
  std::atomic<uint64_t> d2d_copies{0}, d2d_bytes{0};
  std::atomic<uint64_t> staged_copies{0}, staged_bytes{0};  // from pageable memory: staged
  std::atomic<uint64_t> launches{0}, hidden_copies{0}, graph_launches{0}, syncs{0}, event_waits{0};
  std::atomic<uint64_t> hazards{0}, errors{0}, peak_memory_bytes{0};
  std::atomic<uint64_t> sent_bytes{0};
};
inline constexpr int kCounterCount = 17;

Counters& counters();

// Static per call site, so that counting a call costs one atomic addition.
class CallSite {
 public:
  explicit CallSite(const char* name);
  void hit();
  const char* name() const { return name_; }
  uint64_t count() const { return count_; }
  void clear() { count_ = 0; }

 private:
  const char* name_;
  std::atomic<uint64_t> count_{0};
};

// The first statement of a function of the runtime.
#define EMULATOR_CALL()                                \
  const EmulatorInside emulator_inside;                \
  static ::emulator::CallSite emulator_site(__func__); \
  emulator_site.hit()

// A failure that programs handle, out of memory say: remembered for aclGetRecentErrMsg only.
aclError fail(acl::Status status, const std::string& message);

// A misuse of the runtime: also printed and counted.
aclError misuse(acl::Status status, const std::string& message);

// A bug that may or may not show on hardware. With --hazards error the next sync fails with it.
void hazard(const std::string& message);

// A kernel failed on a worker; devices report that at the next sync, and so does this one.
void fault(acl::Status status, const std::string& message);
aclError take_fault();
bool fault_is_pending();  // one that no sync has returned yet

void count_kernel(const std::string& name);
void count_hidden_copy(const std::string& name);  // that an operator makes of a strided tensor
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Writes this process's part of the report; called at exit, and at syncs once a second, so that a
// process that is killed leaves one too.
void write_report(bool at_exit);
void install_exit_report();

}  // namespace emulator
