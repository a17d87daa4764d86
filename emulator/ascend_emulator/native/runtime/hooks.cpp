// What HCCL uses of the runtime and no other file here defines (declared in ../runtime_api.h).
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "memory.h"
#include "options.h"
#include "report.h"
#include "stream.h"

namespace emulator {
namespace {

struct Names {
  std::mutex mutex;
  std::map<const void*, std::string> by_address;
};

Names& names() {
  static Names& instance = *new Names;
  return instance;
}

std::atomic<int> hang_seconds{0};  // 0: those of the command

}  // namespace

std::string name_of_object(const void* address) {
  std::lock_guard lock(names().mutex);
  auto it = names().by_address.find(address);
  return it == names().by_address.end() ? "" : it->second;
}

}  // namespace emulator

using namespace emulator;

ACL_API void emulator_name_object(const void* address, const char* name) {
  std::lock_guard lock(names().mutex);
  names().by_address[address] = name;
}

ACL_API aclError emulator_launch_collective(aclrtStream handle, const char* kernel,
                                            const char* name, void (*run)(void*),
                                            void (*destroy)(void*), void* argument,
                                            const Access* accesses, size_t access_count) {
  std::shared_ptr<void> owned(argument, destroy);
  count_kernel(kernel);
  Task task;
  task.name = name;
  task.accesses.assign(accesses, accesses + access_count);
  task.run = [run, owned](Actor&) { run(owned.get()); };
  return enqueue(stream_of(handle), std::move(task));
}

ACL_API int emulator_misuse(int status, const char* message) {
  return misuse(static_cast<acl::Status>(status), message);
}

ACL_API int emulator_fault_is_pending() { return fault_is_pending(); }

ACL_API int emulator_is_allocated(const void* address, size_t size) {
  return is_device(address) && is_within_allocation(address, size);
}

ACL_API int emulator_hang_seconds() {
  const int set = hang_seconds.load();
  return set ? set : options().hang_seconds;
}

// For tests: ranks first do what they have to in their own time, and then one of them hangs.
ACL_API void emulator_set_hang_seconds(int seconds) { hang_seconds = seconds; }
