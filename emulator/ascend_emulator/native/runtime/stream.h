// Streams: a queue and a worker thread each.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "clock.h"
#include "hazards.h"

namespace emulator {

struct Graph;
struct TaskGroup;

struct Task {
  std::string name;
  std::vector<Access> accesses;      // of device memory, while it runs
  std::function<void(Actor&)> run;   // on the worker, as the actor whose turn it is
  std::function<void()> on_enqueue;  // on the host, at the call, or at each replay of a graph
  bool is_work = true;               // false for records and waits, which only order work
};

void run_task(const Task& task, Actor& actor);

struct Stream {
  Stream(int index, int device);

  const int index;   // per process, 0 is the first default stream
  const int device;
  const std::string label;
  Actor actor;       // used by the worker only

  // Set by the host while it captures into, or updates, a graph (see capture.h).
  Graph* capture = nullptr;
  int branch = 0;
  TaskGroup* open_group = nullptr;
  TaskGroup* updated_group = nullptr;
  size_t next_update = 0;

  void push(Task task);
  bool is_idle();
  void wait_until_idle();      // for what was pushed before the call
  Snapshot completed_clock();  // what the host learns once it knows that the stream is idle
  void stop();
  void wake();  // its worker looks again whether it may run

 private:
  struct Item {
    Task task;
    Snapshot host;  // what the host knew when it enqueued
  };

  void start_worker();
  void work();
  bool take(Item& item);

  std::mutex mutex_;
  std::condition_variable pushed_, finished_;
  std::deque<Item> queue_;
  uint64_t enqueued_ = 0, completed_ = 0;
  bool started_ = false, stopping_ = false;
  Snapshot completed_clock_ = std::make_shared<VectorClock>();
};

bool streams_are_held();  // they run only while the host waits

Stream& stream_of(aclrtStream handle);  // a null handle is the current device's default stream
std::vector<Stream*> all_streams(int device);
bool is_live(const Stream* stream);

// For calls that use a stream: the thread has to have the stream's device set (107003).
aclError need_stream(aclrtStream handle, const char* call);

#define EMULATOR_STREAM_CALL(handle)                                                   \
  EMULATOR_CALL();                                                                     \
  do {                                                                                 \
    if (const auto refused = ::emulator::need_stream(handle, __func__)) return refused; \
  } while (0)

// Runs, captures or records as an update, whichever the stream is set to.
aclError enqueue(Stream& stream, Task task);

// Host waits give up what the launcher asks for, Python's lock, which a reference may need.
class HostWait {
 public:
  HostWait();
  ~HostWait();

 private:
  void* token_;
};

}  // namespace emulator
