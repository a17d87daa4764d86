// Events, and the value writes and waits that torch_npu's ExternalEvent is made of.
#include <condition_variable>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "abi.h"
#include "capture.h"
#include "device.h"
#include "memory.h"
#include "options.h"
#include "report.h"
#include "stream.h"

namespace emulator {
namespace {

uint64_t now_microseconds() {
  using namespace std::chrono;
  return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

// One recording of an event. Who waits, waits for the recording that was current at the call.
struct Recording {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  VectorClock clock;
  uint64_t time = 0;
  Graph* captured_in = nullptr;
};

void complete(Recording& recording, const Actor& actor) {
  {
    std::lock_guard lock(recording.mutex);
    recording.done = true;
    recording.clock = actor.clock();
    recording.time = now_microseconds();
  }
  recording.changed.notify_all();
}

struct Event {
  std::mutex mutex;
  std::shared_ptr<Recording> current;

  std::shared_ptr<Recording> recording() {
    std::lock_guard lock(mutex);
    return current;
  }
};

Event& event_of(aclrtEvent handle) { return *static_cast<Event*>(handle); }

aclError create_event(aclrtEvent* out) {
  *out = new Event;
  return acl::kSuccess;
}

aclError record(Event& event, Stream& stream) {
  auto recording = std::make_shared<Recording>();
  recording->captured_in = stream.capture;
  {
    std::lock_guard lock(event.mutex);
    event.current = recording;
  }
  Task task;
  task.name = "event record";
  task.is_work = false;
  task.run = [recording](Actor& actor) { complete(*recording, actor); };
  const auto error = enqueue(stream, std::move(task));
  if (!error && stream.capture) note_captured_record(stream, recording.get());
  return error;
}

aclError wait_for(Stream& stream, const std::shared_ptr<Recording>& recording) {
  if (recording->captured_in) {
    if (const auto error = join_capture(stream, recording->captured_in, recording.get())) return error;
  } else if (stream.capture) {
    invalidate(*stream.capture);
    return misuse(acl::kCaptureDependency,
                  "a captured stream waits for an event that was recorded outside the capture");
  }
  Task task;
  task.name = "event wait";
  task.is_work = false;
  task.run = [recording](Actor& actor) {
    std::unique_lock lock(recording->mutex);
    recording->changed.wait(lock, [&] { return recording->done; });
    actor.join(recording->clock);
  };
  return enqueue(stream, std::move(task));
}

// The host learns what the event's stream had done and seen when it recorded.
void host_learns(Recording& recording) {
  VectorClock clock;
  {
    std::lock_guard lock(recording.mutex);
    clock = recording.clock;
  }
  Host::instance().learns(clock);
}

aclError synchronize(Event& event) {
  ++counters().syncs;
  auto recording = event.recording();
  if (!recording) return acl::kSuccess;
  if (recording->captured_in)
    return misuse(acl::kEventCaptured, "synchronise of an event that was recorded in a capture");
  {
    HostWait wait;
    std::unique_lock lock(recording->mutex);
    recording->changed.wait(lock, [&] { return recording->done; });
  }
  host_learns(*recording);
  return take_fault();
}

// Device words used as semaphores carry the clock of whoever wrote them last.
struct Words {
  std::mutex mutex;
  std::map<const void*, VectorClock> clocks;
};

Words& words() {
  static Words& instance = *new Words;
  return instance;
}

void write_word(void* address, uint64_t value, Actor& actor) {
  std::lock_guard lock(words().mutex);
  words().clocks[address] = actor.clock();
  __atomic_store_n(reinterpret_cast<uint64_t*>(alias_of(address)), value, __ATOMIC_RELEASE);
}

bool has_value(const void* address, uint64_t value, uint32_t flag) {
  const auto* word = reinterpret_cast<const uint64_t*>(alias_of(address));
  const uint64_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  return flag == acl::kWaitEqual ? now == value : now >= value;
}

void wait_for_word(void* address, uint64_t value, uint32_t flag, Actor& actor) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(options().hang_seconds);
  for (;;) {
    {
      std::lock_guard lock(words().mutex);
      if (has_value(address, value, flag)) {
        actor.join(words().clocks[address]);
        return;
      }
    }
    if (std::chrono::steady_clock::now() > limit) {
      fault(acl::kWaitTimeout, "a stream hung: the external event it waits for was never recorded");
      return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

aclError check_word(const void* address) {
  if (!is_device(address) || !is_within_allocation(address, sizeof(uint64_t)))
    return misuse(acl::kInvalidParameter,
                  "value write or wait outside device memory: " + describe_address(address));
  if (reinterpret_cast<uintptr_t>(address) % sizeof(uint64_t))
    return misuse(acl::kUnaligned, "value write or wait at an address that is no multiple of 8: " +
                                       describe_address(address));
  return acl::kSuccess;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

ACL_API aclError aclrtCreateEvent(aclrtEvent* out) {
  EMULATOR_DEVICE_CALL();
  return create_event(out);
}

ACL_API aclError aclrtCreateEventWithFlag(aclrtEvent* out, uint32_t) {
  EMULATOR_DEVICE_CALL();
  return create_event(out);
}

ACL_API aclError aclrtCreateEventExWithFlag(aclrtEvent* out, uint32_t) {
  EMULATOR_DEVICE_CALL();
  return create_event(out);
}

ACL_API aclError aclrtDestroyEvent(aclrtEvent event) {
  EMULATOR_CALL();
  delete static_cast<Event*>(event);  // tasks hold the recording, not the event
  return acl::kSuccess;
}

ACL_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  EMULATOR_STREAM_CALL(stream);
  return record(event_of(event), stream_of(stream));
}

ACL_API aclError aclrtResetEvent(aclrtEvent, aclrtStream) {
  EMULATOR_CALL();
  return acl::kSuccess;  // every recording is its own object here
}

ACL_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  EMULATOR_STREAM_CALL(stream);
  ++counters().event_waits;
  auto recording = event_of(event).recording();
  if (!recording) return acl::kSuccess;  // never recorded: nothing to wait for
  return wait_for(stream_of(stream), recording);
}

ACL_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
  EMULATOR_CALL();
  return synchronize(event_of(event));
}

ACL_API aclError aclrtQueryEventStatus(aclrtEvent event, int* status) {
  EMULATOR_CALL();
  auto recording = event_of(event).recording();
  *status = acl::kEventComplete;
  if (!recording || recording->captured_in) return acl::kSuccess;
  {
    std::lock_guard lock(recording->mutex);
    if (!recording->done) *status = acl::kEventNotReady;
  }
  if (*status == acl::kEventComplete) host_learns(*recording);
  return acl::kSuccess;
}

ACL_API aclError aclrtQueryEventWaitStatus(aclrtEvent, int* status) {
  EMULATOR_CALL();
  *status = 0;  // complete
  return acl::kSuccess;
}

ACL_API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  EMULATOR_CALL();
  auto first = event_of(start).recording(), second = event_of(end).recording();
  if (!first || !second)
    return misuse(acl::kInvalidParameter, "elapsed time of an event that was never recorded");
  *milliseconds = (static_cast<double>(second->time) - static_cast<double>(first->time)) / 1000.0;
  return acl::kSuccess;
}

ACL_API aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
  EMULATOR_STREAM_CALL(stream);
  if (const auto error = check_word(address)) return error;
  Task task;
  task.name = "value write";
  task.run = [=](Actor& actor) { write_word(address, value, actor); };
  return enqueue(stream_of(stream), std::move(task));
}

ACL_API aclError aclrtValueWait(void* address, uint64_t value, uint32_t flag, aclrtStream stream) {
  EMULATOR_STREAM_CALL(stream);
  if (const auto error = check_word(address)) return error;
  if (flag != acl::kWaitEqual && flag != acl::kWaitGreaterEqual)
    return misuse(acl::kInvalidParameter, "value wait with an unknown flag");
  Task task;
  task.name = "value wait";
  task.run = [=](Actor& actor) { wait_for_word(address, value, flag, actor); };
  return enqueue(stream_of(stream), std::move(task));
}
