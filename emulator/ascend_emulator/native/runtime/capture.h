// Graphs: what NPUGraph captures, replays and updates.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "clock.h"
#include "stream.h"
#include "stream_resources.h"

namespace emulator {

// A captured task. A task-group update puts another task in its place, in stream order.
struct Node {
  Task task;
  int branch = 0;
  std::mutex mutex;
  Epoch last_run, last_update;  // to find updates that nothing orders with the replays
};

struct TaskGroup {
  std::vector<std::shared_ptr<Node>> nodes;
};

// One stream's part of a capture. Branch 0 is replayed as the replaying stream itself.
struct Branch {
  Stream* stream = nullptr;
  std::unique_ptr<Actor> actor;  // none for branch 0
  VectorClock seen;              // while capturing: which branches' tasks come before the next one
  uint64_t tasks = 0, last_work = 0;
};

struct Graph {
  uint32_t id = 0;
  bool is_active = true;   // still captured into
  bool is_invalid = false;
  int mode = acl::kModeGlobal;
  std::vector<std::shared_ptr<Node>> nodes;
  std::vector<Branch> branches;
  std::map<const void*, VectorClock> records;  // captured event recordings
  std::set<const void*> groups;                // that communicate in it
  std::map<std::pair<int, StreamUse>, int> streams_held;  // by device

  ~Graph();
};

aclError record_capture(Stream& stream, Task task);
aclError record_update(Stream& stream, Task task);

// A stream waits for an event recorded in a capture: it takes part from there on.
aclError join_capture(Stream& stream, Graph* graph, const void* recording);
void note_captured_record(Stream& stream, const void* recording);

// A group communicates in the capture: the graph holds streams for it from now on.
aclError communicate_in_capture(Graph& graph, const void* group);

void invalidate(Graph& graph);
bool forbidden_by_capture();  // for calls that a capture in global mode doesn't allow

}  // namespace emulator
