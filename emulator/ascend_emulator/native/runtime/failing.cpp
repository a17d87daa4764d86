#include "failing.h"

#include <atomic>
#include <mutex>

#include "abi.h"

namespace emulator {
namespace {

// Few programs plant a failure, and every task asks.
std::atomic<bool> is_planted{false};

struct Planted {
  std::mutex mutex;
  std::string name;
  int skip = 0, times = 0;
};

Planted& planted() {
  static Planted& instance = *new Planted;
  return instance;
}

}  // namespace

bool is_to_fail(const std::string& task) {
  if (!is_planted) return false;
  auto& p = planted();
  std::lock_guard lock(p.mutex);
  if (task != p.name || p.times == 0 || p.skip-- > 0) return false;
  p.skip = 0;
  is_planted = --p.times > 0;
  return true;
}

}  // namespace emulator

using namespace emulator;

ACL_API void emulator_fail_kernel(const char* name, int skip, int times) {
  auto& p = planted();
  std::lock_guard lock(p.mutex);
  p.name = name;
  p.skip = skip;
  p.times = times;
  is_planted = times > 0;
}
