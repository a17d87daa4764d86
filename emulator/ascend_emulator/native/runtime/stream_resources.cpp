#include "stream_resources.h"

#include <array>
#include <map>
#include <mutex>

#include "capture.h"
#include "device.h"
#include "options.h"
#include "report.h"
#include "stream.h"

namespace emulator {
namespace {

struct Held {
  std::array<int, 3> by_use{};

  int& of(StreamUse use) { return by_use[static_cast<size_t>(use)]; }
  int total() const { return by_use[0] + by_use[1] + by_use[2]; }
};

struct Resources {
  std::mutex mutex;
  std::map<int, Held> held;  // by device
};

Resources& resources() {
  static Resources& instance = *new Resources;
  return instance;
}

}  // namespace

aclError take_streams(int device, int count, StreamUse use, const std::string& wanted_for) {
  auto& r = resources();
  std::unique_lock lock(r.mutex);
  auto& held = r.held[device];
  if (held.total() + count <= options().streams) {
    held.of(use) += count;
    return acl::kSuccess;
  }
  const auto text = "the stream resources are insufficient: npu:" + std::to_string(device) +
                    " has " + std::to_string(options().streams) + " streams, " +
                    std::to_string(held.of(StreamUse::kProgram)) + " are in use by the program, " +
                    std::to_string(held.of(StreamUse::kGraph)) + " by captured graphs, " +
                    std::to_string(held.of(StreamUse::kCommunication)) +
                    " by communication; wanted " + std::to_string(count) + " for " + wanted_for;
  lock.unlock();
  return fail(acl::kNoStreamResource, text);
}

void give_streams(int device, int count, StreamUse use) {
  auto& r = resources();
  std::lock_guard lock(r.mutex);
  r.held[device].of(use) -= count;
}

int free_streams(int device) {
  auto& r = resources();
  std::lock_guard lock(r.mutex);
  return options().streams - r.held[device].total();
}

}  // namespace emulator

using namespace emulator;

ACL_API aclError emulator_take_streams(int device, int count, const char* wanted_for) {
  return take_streams(device, count, StreamUse::kCommunication, wanted_for);
}

ACL_API void emulator_give_streams(int device, int count) {
  give_streams(device, count, StreamUse::kCommunication);
}

ACL_API aclError emulator_note_communication(aclrtStream handle, const void* group) {
  auto& stream = stream_of(handle);
  return stream.capture ? communicate_in_capture(*stream.capture, group) : acl::kSuccess;
}

ACL_API aclError aclrtGetStreamAvailableNum(uint32_t* count) {
  EMULATOR_DEVICE_CALL();
  *count = static_cast<uint32_t>(free_streams(current_device()));
  return acl::kSuccess;
}
