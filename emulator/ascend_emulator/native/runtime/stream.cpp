#include "stream.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <utility>

#include "capture.h"
#include "device.h"
#include "failing.h"
#include "memory.h"
#include "options.h"
#include "pinned.h"
#include "report.h"
#include "stream_resources.h"
#include "virtual_memory.h"

namespace emulator {
namespace {

constexpr int kDelayMicroseconds = 300;
constexpr int kPollMicroseconds = 50;

struct Streams {
  std::mutex mutex;
  std::set<Stream*> live;
  std::vector<Stream*> defaults;  // by device
  int next_index = 0;
};

Streams& streams() {
  static Streams& instance = *new Streams;
  return instance;
}

Stream* create_locked(Streams& s, int device) {
  auto* stream = new Stream(s.next_index++, std::max(device, 0));
  s.live.insert(stream);
  return stream;
}

aclError create_stream(aclrtStream* out) {
  const int device = current_device();
  if (const auto error = take_streams(device, 1, StreamUse::kProgram, "a stream")) return error;
  auto& s = streams();
  std::lock_guard lock(s.mutex);
  *out = create_locked(s, device);
  return acl::kSuccess;
}

// The runtime's own stream of a device is there from the start, and not counted.
Stream* default_stream() {
  auto& s = streams();
  const int device = std::max(current_device(), 0);
  std::lock_guard lock(s.mutex);
  if (s.defaults.size() <= static_cast<size_t>(device)) s.defaults.resize(device + 1, nullptr);
  if (!s.defaults[device]) s.defaults[device] = create_locked(s, device);
  return s.defaults[device];
}

// Skewed: streams whose indices differ by one differ by much, the first ones being the slowest.
int delay_of(int stream_index) {
  switch (options().delay) {
    case Delay::kNone: return 0;
    case Delay::kEqual: return kDelayMicroseconds;
    case Delay::kSkewed: break;
  }
  constexpr int kFactors[] = {8, 0, 3, 1};
  return kDelayMicroseconds * kFactors[stream_index % 4];
}

// Held streams run while the host waits for something, and not otherwise.
std::atomic<bool> held{false};
std::atomic<int> host_waits{0};

bool may_run() { return !held || host_waits > 0; }

void wake_streams() {
  auto& s = streams();
  std::lock_guard lock(s.mutex);
  for (auto* stream : s.live) stream->wake();
}

void* (*release_hook)() = nullptr;
void (*reacquire_hook)(void*) = nullptr;

aclError synchronize(Stream& stream) {
  ++counters().syncs;
  if (stream.capture) {
    invalidate(*stream.capture);
    return misuse(acl::kStreamCaptured, "synchronise of " + stream.label + " while it is captured");
  }
  {
    HostWait wait;
    stream.wait_until_idle();
  }
  Host::instance().learns(*stream.completed_clock());
  write_report(false);
  return take_fault();
}

aclError synchronize_device() {
  ++counters().syncs;
  if (forbidden_by_capture())
    return misuse(acl::kNotAllowedInCapture, "synchronise of the device during a capture");
  for (auto* stream : all_streams(current_device())) {
    {
      HostWait wait;
      stream->wait_until_idle();
    }
    Host::instance().learns(*stream->completed_clock());
  }
  write_report(false);
  return take_fault();
}

aclError destroy_stream(aclrtStream handle) {
  auto* stream = static_cast<Stream*>(handle);
  if (!is_live(stream)) return misuse(acl::kInvalidHandle, "destruction of an unknown stream");
  if (const auto error = need_stream(handle, "destruction of a stream")) return error;
  {
    HostWait wait;
    stream->wait_until_idle();
  }
  auto& s = streams();
  std::lock_guard lock(s.mutex);
  s.live.erase(stream);
  give_streams(stream->device, 1, StreamUse::kProgram);
  stream->stop();  // the object stays: a captured graph or an event may still name it
  return acl::kSuccess;
}

}  // namespace

namespace {

// The task that a worker runs, for `emulator_touch`.
struct Running {
  const Task* task;
  Actor* actor;
  Epoch epoch;
};

thread_local const Running* running = nullptr;

// Devices report such an access as a fault of the kernel. It isn't run: the host has no bytes there.
bool touches_unmapped(const Task& task) {
  for (const auto& access : task.accesses) {
    if (!is_virtual(access.begin) || is_mapped(access.begin, access.size)) continue;
    fault(acl::kKernelFault, task.name + " touches memory that is not mapped, within " +
                                 std::to_string(access.size) + " bytes from " +
                                 describe_virtual(access.begin, true));
    return true;
  }
  return false;
}

// What it should have written stays as it was.
bool fails(const Task& task) {
  if (!is_to_fail(task.name)) return false;
  fault(acl::kKernelFault,
        "a kernel failed because a test asked for it, fault kernel_name=" + task.name);
  return true;
}

}  // namespace

void run_task(const Task& task, Actor& actor) {
  const auto epoch = actor.tick();
  if (touches_unmapped(task) || fails(task)) return;
  check_accesses(task.accesses, epoch, actor.clock(), task.name);
  const Running now{&task, &actor, epoch};
  const auto* before = std::exchange(running, &now);  // a replay is a task that runs others
  task.run(actor);
  running = before;
}

Stream::Stream(int stream_index, int stream_device)
    : index(stream_index),
      device(stream_device),
      label("stream " + std::to_string(stream_index) + " of npu:" + std::to_string(stream_device)),
      actor(label) {}

void Stream::push(Task task) {
  std::lock_guard lock(mutex_);
  if (!started_) start_worker();
  queue_.push_back({std::move(task), Host::instance().snapshot()});
  ++enqueued_;
  if (may_run()) pushed_.notify_one();
}

void Stream::start_worker() {
  started_ = true;
  std::thread([this] { work(); }).detach();
}

bool Stream::take(Item& item) {
  std::unique_lock lock(mutex_);
  pushed_.wait(lock, [&] { return stopping_ || (!queue_.empty() && may_run()); });
  if (queue_.empty()) return false;
  item = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

void Stream::work() {
  Item item;
  while (take(item)) {
    if (const int delay = delay_of(index)) usleep(delay);
    actor.join(*item.host);
    run_task(item.task, actor);
    item = {};  // drops what the task holds before it counts as complete
    auto clock = std::make_shared<VectorClock>(actor.clock());
    std::lock_guard lock(mutex_);
    completed_clock_ = std::move(clock);
    ++completed_;
    finished_.notify_all();
  }
}

bool Stream::is_idle() {
  std::lock_guard lock(mutex_);
  return completed_ >= enqueued_;
}

void Stream::wait_until_idle() {
  std::unique_lock lock(mutex_);
  const uint64_t target = enqueued_;
  finished_.wait(lock, [&] { return completed_ >= target; });
}

Snapshot Stream::completed_clock() {
  std::lock_guard lock(mutex_);
  return completed_clock_;
}

void Stream::wake() {
  std::lock_guard lock(mutex_);
  pushed_.notify_all();
}

void Stream::stop() {
  std::lock_guard lock(mutex_);
  stopping_ = true;
  pushed_.notify_all();
}

Stream& stream_of(aclrtStream handle) {
  return handle ? *static_cast<Stream*>(handle) : *default_stream();
}

std::vector<Stream*> all_streams(int device) {
  auto& s = streams();
  std::lock_guard lock(s.mutex);
  std::vector<Stream*> out;
  for (auto* stream : s.live)
    if (stream->device == device) out.push_back(stream);
  return out;
}

bool is_live(const Stream* stream) {
  auto& s = streams();
  std::lock_guard lock(s.mutex);
  return s.live.count(const_cast<Stream*>(stream)) != 0;
}

aclError need_stream(aclrtStream handle, const char* call) {
  if (const auto error = need_device(call)) return error;
  if (!handle) return acl::kSuccess;
  const auto& stream = *static_cast<Stream*>(handle);
  if (stream.device == current_device()) return acl::kSuccess;
  return misuse(acl::kStreamContext, std::string(call) + " with " + stream.label +
                                         " on a thread that has npu:" +
                                         std::to_string(current_device()) +
                                         " set: call set_device first");
}

aclError enqueue(Stream& stream, Task task) {
  if (stream.updated_group) return record_update(stream, std::move(task));
  if (stream.capture) return record_capture(stream, std::move(task));
  if (task.on_enqueue) task.on_enqueue();
  stream.push(std::move(task));
  return acl::kSuccess;
}

bool streams_are_held() { return held; }

HostWait::HostWait() : token_(release_hook ? release_hook() : nullptr) {
  ++host_waits;
  if (held) wake_streams();
}

HostWait::~HostWait() {
  --host_waits;
  if (reacquire_hook) reacquire_hook(token_);
}

}  // namespace emulator

using namespace emulator;

ACL_API void emulator_set_wait_hooks(void* (*release)(), void (*reacquire)(void*)) {
  release_hook = release;
  reacquire_hook = reacquire;
}

ACL_API aclError emulator_launch(aclrtStream handle, const char* name, void (*run)(void*),
                                 void (*destroy)(void*), void* argument, const Access* accesses,
                                 size_t access_count) {
  std::shared_ptr<void> owned(argument, destroy);
  if (const auto refused = need_stream(handle, name)) return refused;
  count_kernel(name);
  Task task;
  task.name = name;
  task.accesses.assign(accesses, accesses + access_count);
  task.run = [run, owned](Actor&) { run(owned.get()); };
  return enqueue(stream_of(handle), std::move(task));
}

// Other threads that still wait would let the streams run: they are given the time to go on.
ACL_API void emulator_hold_streams(int hold) {
  while (hold && host_waits > 0) usleep(kPollMicroseconds);
  held = hold != 0;
  wake_streams();
}

// The program learns nothing: what it does next is not ordered after what has run.
ACL_API void emulator_let_run() {
  for (auto* stream : all_streams(current_device())) {
    HostWait wait;
    stream->wait_until_idle();
  }
}

ACL_API void emulator_touch(const void* alias, size_t size, int write) {
  if (!running || !is_alias(alias)) return;
  check_accesses({{address_of_alias(alias), size, write != 0}}, running->epoch,
                 running->actor->clock(), running->task->name);
}

ACL_API int emulator_is_capturing(aclrtStream handle) {
  const auto& stream = stream_of(handle);
  return stream.capture != nullptr || stream.updated_group != nullptr;
}

ACL_API aclError aclrtCreateStream(aclrtStream* out) {
  EMULATOR_DEVICE_CALL();
  return create_stream(out);
}

ACL_API aclError aclrtCreateStreamWithConfig(aclrtStream* out, uint32_t, uint32_t) {
  EMULATOR_DEVICE_CALL();
  return create_stream(out);
}

ACL_API aclError aclrtDestroyStream(aclrtStream stream) {
  EMULATOR_DEVICE_CALL();
  return destroy_stream(stream);
}

ACL_API aclError aclrtDestroyStreamForce(aclrtStream stream) {
  EMULATOR_DEVICE_CALL();
  return destroy_stream(stream);
}

ACL_API aclError aclrtSynchronizeStream(aclrtStream stream) {
  EMULATOR_DEVICE_CALL();
  return synchronize(stream_of(stream));
}

ACL_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  EMULATOR_DEVICE_CALL();
  return synchronize(stream_of(stream));
}

ACL_API aclError aclrtSynchronizeDevice() {
  EMULATOR_DEVICE_CALL();
  return synchronize_device();
}

ACL_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) {
  EMULATOR_DEVICE_CALL();
  return synchronize_device();
}

ACL_API aclError aclrtStreamQuery(aclrtStream handle, int* status) {
  EMULATOR_DEVICE_CALL();
  auto& stream = stream_of(handle);
  if (stream.capture) return misuse(acl::kStreamCaptured, "query of a stream that is captured");
  const bool idle = stream.is_idle();
  if (idle) Host::instance().learns(*stream.completed_clock());
  *status = idle ? acl::kStreamComplete : acl::kStreamNotReady;
  return acl::kSuccess;
}

ACL_API aclError aclrtStreamGetId(aclrtStream stream, int32_t* out) {
  EMULATOR_CALL();
  *out = stream_of(stream).index;
  return acl::kSuccess;
}

ACL_API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) {
  EMULATOR_CALL();
  return acl::kSuccess;
}

ACL_API aclError aclrtSetStreamAttribute(aclrtStream, int, void*) {
  EMULATOR_CALL();
  return acl::kSuccess;
}

ACL_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* argument) {
  EMULATOR_STREAM_CALL(stream);
  Task task;
  task.name = "host function";
  task.run = [function, argument](Actor&) {
    deliver_all_targets();  // it may read what was copied to the host before it
    function(argument);
  };
  return enqueue(stream_of(stream), std::move(task));
}
