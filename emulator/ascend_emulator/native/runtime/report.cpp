#include "report.h"

#include <fnmatch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include <cxxabi.h>
#include <pthread.h>
#include <time.h>

#include "memory.h"
#include "options.h"
#include "stream.h"

namespace emulator {
namespace {

constexpr size_t kMessagesKept = 200;

// Of one thread, whose calls may be nested. It counts while streams are held: reading the clock is a
// system call.
struct HostTime {
  int depth = 0;
  int64_t since = 0, inside = 0;  // nanoseconds of the thread's processor time
};

thread_local HostTime host_time;

int64_t thread_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000ll + now.tv_nsec;
}

struct Log {
  std::mutex mutex;
  std::vector<CallSite*> sites;
  std::map<std::string, uint64_t> kernels;
  std::vector<std::string> hazards, errors;
  std::set<std::string> hazards_said, allowed_hazards;
  acl::Status fault_status = acl::kSuccess;
  std::string fault_message;
};

Log& log() {
  static Log& instance = *new Log;  // never destroyed: workers may outlive static destructors
  return instance;
}

// torch_npu keeps the pointer that aclGetRecentErrMsg returned, so a few messages stay alive.
constexpr size_t kMessagesAlive = 64;
thread_local std::deque<std::string> recent_errors;

void remember(const std::string& message) {
  recent_errors.push_back("emulator: " + message);
  if (recent_errors.size() > kMessagesAlive) recent_errors.pop_front();
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

std::string list_of(const std::vector<std::string>& items) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? ", " : "") + quoted(item);
  return out + "]";
}

template <class Map>
std::string object_of(const Map& items) {
  std::string out = "{";
  for (const auto& [key, value] : items)
    out += (out.size() > 1 ? ", " : "") + quoted(key) + ": " + std::to_string(value);
  return out + "}";
}

std::string report_text() {
  auto& c = counters();
  const std::vector<std::pair<std::string, uint64_t>> numbers{
      {"h2d_copies", c.h2d_copies},       {"h2d_bytes", c.h2d_bytes},
      {"d2h_copies", c.d2h_copies},       {"d2h_bytes", c.d2h_bytes},
      {"d2d_copies", c.d2d_copies},       {"d2d_bytes", c.d2d_bytes},
      {"staged_copies", c.staged_copies}, {"staged_bytes", c.staged_bytes},
      {"launches", c.launches},           {"hidden_copies", c.hidden_copies},
      {"graph_launches", c.graph_launches},
      {"syncs", c.syncs},                 {"event_waits", c.event_waits},
      {"hazards", c.hazards},             {"errors", c.errors},
      {"peak_memory_bytes", c.peak_memory_bytes},
      {"sent_bytes", c.sent_bytes}};
  const auto held = held_memory();
  std::lock_guard lock(log().mutex);
  std::vector<std::string> pending;
  if (log().fault_status != acl::kSuccess) pending.push_back(log().fault_message);
  std::map<std::string, uint64_t> calls;
  for (auto* site : log().sites)
    if (site->count()) calls[site->name()] += site->count();
  return "{\"pid\": " + std::to_string(getpid()) + ", \"counters\": " + object_of(numbers) +
         ", \"calls\": " + object_of(calls) + ", \"kernels\": " + object_of(log().kernels) +
         ", \"hazards\": " + list_of(log().hazards) + ", \"allowed_hazards\": " +
         list_of({log().allowed_hazards.begin(), log().allowed_hazards.end()}) +
         ", \"errors\": " + list_of(log().errors) +
         ", \"leaks\": " + list_of(held.leaks) + ", \"held_at_exit\": " +
         object_of(std::map<std::string, uint64_t>{{"blocks", held.pooled_blocks},
                                                   {"bytes", held.pooled_bytes}}) +
         ", \"unreported_faults\": " + list_of(pending) + "}\n";
}

void at_exit() { write_report(true); }

// A forked child starts from zero: what the parent did is in the parent's report.
void after_fork_in_child() {
  new (&log().mutex) std::mutex;
  for (auto* site : log().sites) site->clear();
  log().kernels.clear();
  log().hazards.clear();
  log().allowed_hazards.clear();
  log().errors.clear();
  auto* values = reinterpret_cast<std::atomic<uint64_t>*>(&counters());
  for (int i = 0; i < kCounterCount; ++i) values[i] = 0;
}

void keep(std::vector<std::string>& messages, const std::string& message) {
  if (messages.size() < kMessagesKept) messages.push_back(message);
}

bool is_allowed(const std::string& hazard) {
  const auto& patterns = options().allowed_hazards;
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return fnmatch(("*" + pattern + "*").c_str(), hazard.c_str(), 0) == 0;
  });
}

}  // namespace

Counters& counters() {
  static Counters& instance = *new Counters;
  return instance;
}
static_assert(sizeof(Counters) == kCounterCount * sizeof(uint64_t));

CallSite::CallSite(const char* name) : name_(name) {
  std::lock_guard lock(log().mutex);
  log().sites.push_back(this);
}

void CallSite::hit() {
  ++count_;
  if (options().trace) say("call %s", name_);
}

void say(const char* format, ...) {
  char line[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "npu-emulator[%d]: %s\n", getpid(), line);
}

aclError fail(acl::Status status, const std::string& message) {
  remember(message);
  if (options().trace) say("status %d: %s", status, message.c_str());
  return status;
}

aclError misuse(acl::Status status, const std::string& message) {
  remember(message);
  ++counters().errors;
  say("ERROR %d: %s", status, message.c_str());
  std::lock_guard lock(log().mutex);
  keep(log().errors, message);
  return status;
}

void hazard(const std::string& message) {
  if (is_allowed(message)) {
    std::lock_guard lock(log().mutex);
    if (log().allowed_hazards.size() < kMessagesKept) log().allowed_hazards.insert(message);
    return;
  }
  ++counters().hazards;
  bool is_new;
  {
    std::lock_guard lock(log().mutex);
    keep(log().hazards, message);
    is_new = log().hazards_said.insert(message).second;
  }
  if (is_new) say("HAZARD: %s", message.c_str());
  if (options().hazards_are_errors) fault(acl::kInternalError, "hazard: " + message);
}

void fault(acl::Status status, const std::string& message) {
  std::lock_guard lock(log().mutex);
  if (log().fault_status != acl::kSuccess) return;  // the first one is the cause
  log().fault_status = status;
  log().fault_message = message;
  // Not every sync of torch_npu passes the message on.
  if (status != acl::kInternalError) say("FAULT: %s", message.c_str());
}

aclError take_fault() {
  std::lock_guard lock(log().mutex);
  const auto status = log().fault_status;
  if (status != acl::kSuccess) remember(log().fault_message);
  log().fault_status = acl::kSuccess;
  return status;
}

bool fault_is_pending() {
  std::lock_guard lock(log().mutex);
  return log().fault_status != acl::kSuccess;
}

void count_kernel(const std::string& name) {
  ++counters().launches;
  if (options().trace) say("launch %s", name.c_str());
  std::lock_guard lock(log().mutex);
  ++log().kernels[name];
}

void count_hidden_copy(const std::string& name) {
  ++counters().hidden_copies;
  if (options().trace) say("%s", name.c_str());
  std::lock_guard lock(log().mutex);
  ++log().kernels[name];
}

void write_report(bool at_exit) {
  using Clock = std::chrono::steady_clock;
  static Clock::time_point last;
  static std::mutex& mutex = *new std::mutex;
  if (options().report_folder.empty()) return;
  std::lock_guard lock(mutex);
  if (!at_exit && Clock::now() - last < std::chrono::seconds(1)) return;
  last = Clock::now();
  const auto path = options().report_folder + "/" + std::to_string(getpid()) + ".json";
  const auto partial = path + ".partial";
  if (FILE* file = std::fopen(partial.c_str(), "w")) {
    const auto text = report_text();
    std::fwrite(text.data(), 1, text.size(), file);
    std::fclose(file);
    std::rename(partial.c_str(), path.c_str());
  }
}

void install_exit_report() {
  static std::once_flag once;
  std::call_once(once, [] {
    std::atexit(at_exit);
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
  });
}

}  // namespace emulator

using namespace emulator;

ACL_API const char* aclGetRecentErrMsg() {
  EMULATOR_CALL();
  return recent_errors.empty() ? "" : recent_errors.back().c_str();
}

ACL_API void emulator_counters(uint64_t* out) {
  const auto* values = reinterpret_cast<const std::atomic<uint64_t>*>(&counters());
  for (int i = 0; i < kCounterCount; ++i) out[i] = values[i];
}

ACL_API void emulator_enter() {
  if (host_time.depth++ == 0) host_time.since = streams_are_held() ? thread_ns() : 0;
}

ACL_API void emulator_leave() {
  if (--host_time.depth == 0 && host_time.since) host_time.inside += thread_ns() - host_time.since;
}

ACL_API uint64_t emulator_host_ns() { return host_time.inside; }

ACL_API void emulator_count_hidden_copy(const char* name) { count_hidden_copy(name); }

ACL_API void emulator_count_sent(uint64_t bytes) { counters().sent_bytes += bytes; }

ACL_API void emulator_fault(const char* message) { fault(acl::kKernelFault, message); }

ACL_API void emulator_write_report() { write_report(true); }

// Every imported symbol that nothing implements lands here with its name (see emulator/build.py).
ACL_API long emulator_unimplemented(const char* name) {
  char* readable = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);  // those of atb are C++
  const std::string function = readable ? readable : name;
  say("FATAL: %s is not implemented by the emulated Ascend runtime", function.c_str());
  misuse(acl::kNotSupported, function + " is not implemented");
  write_report(true);
  std::abort();
}
