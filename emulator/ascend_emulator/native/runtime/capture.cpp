// A capture is the list of tasks in the order of the calls, which respects every edge between the
// captured streams, so a replay runs the list on one worker. The clocks still treat each captured
// stream as an actor of its own: a missing join inside a graph is found as one outside is.
#include "capture.h"

#include <atomic>
#include <cstdio>
#include <set>

#include "device.h"
#include "options.h"
#include "report.h"
#include "stream_resources.h"

namespace emulator {
namespace {

struct Graphs {
  std::mutex mutex;
  std::map<const Graph*, std::shared_ptr<Graph>> live;
  uint32_t next_id = 1;
  std::atomic<int> active_global{0};
};

Graphs& graphs() {
  static Graphs& instance = *new Graphs;
  return instance;
}

thread_local int thread_mode = acl::kModeGlobal;

std::shared_ptr<Graph> find(aclmdlRI handle) {
  std::lock_guard lock(graphs().mutex);
  auto it = graphs().live.find(static_cast<Graph*>(handle));
  return it == graphs().live.end() ? nullptr : it->second;
}

// The last reference to it, but for replays in flight.
std::shared_ptr<Graph> forget(aclmdlRI handle) {
  std::lock_guard lock(graphs().mutex);
  auto it = graphs().live.find(static_cast<Graph*>(handle));
  if (it == graphs().live.end()) return nullptr;
  auto graph = it->second;
  graphs().live.erase(it);
  return graph;
}

aclError add_branch(Graph& graph, Stream& stream) {
  if (const auto error = take_streams(stream.device, 1, StreamUse::kGraph,
                                      stream.label + " in the capture of a graph"))
    return error;
  ++graph.streams_held[{stream.device, StreamUse::kGraph}];
  const int index = static_cast<int>(graph.branches.size());
  Branch branch;
  branch.stream = &stream;
  if (index) {
    branch.actor = std::make_unique<Actor>("branch " + std::to_string(index) + " (" +
                                           stream.label + ") of graph " + std::to_string(graph.id));
  }
  graph.branches.push_back(std::move(branch));
  stream.capture = &graph;
  stream.branch = index;
  return acl::kSuccess;
}

aclError begin_capture(Stream& stream, int mode) {
  if (stream.capture) return misuse(acl::kStreamCaptured, stream.label + " is captured already");
  auto graph = std::make_shared<Graph>();
  graph->mode = mode;
  if (const auto error = add_branch(*graph, stream)) return error;
  std::lock_guard lock(graphs().mutex);
  graph->id = graphs().next_id++;
  graphs().live[graph.get()] = graph;
  if (mode == acl::kModeGlobal) ++graphs().active_global;
  return acl::kSuccess;
}

std::string unjoined_branch(const Graph& graph) {
  const auto& origin = graph.branches.front();
  for (size_t i = 1; i < graph.branches.size(); ++i) {
    const auto& branch = graph.branches[i];
    if (origin.seen.at(static_cast<int>(i)) < branch.last_work) return branch.stream->label;
  }
  return "";
}

aclError end_capture(Stream& stream, aclmdlRI* out) {
  auto* graph = stream.capture;
  if (!graph) return misuse(acl::kStreamNotCaptured, stream.label + " is not captured");
  if (stream.branch != 0)
    return misuse(acl::kCaptureUnmatched, "the capture ends on a stream that it didn't begin on");
  for (auto& branch : graph->branches) {
    branch.stream->capture = nullptr;
    branch.stream->open_group = nullptr;
  }
  graph->is_active = false;
  if (graph->mode == acl::kModeGlobal) --graphs().active_global;
  *out = graph;
  if (!graph->is_invalid && unjoined_branch(*graph).empty()) return acl::kSuccess;
  *out = nullptr;  // there is no graph then, and nothing to destroy
  const auto owned = forget(graph);
  if (graph->is_invalid)
    return fail(acl::kCaptureInvalidated, "the capture was invalidated by an earlier error");
  return misuse(acl::kStreamUnjoined, unjoined_branch(*graph) +
                                          " was forked into the capture and not joined again");
}

void check_update_order(Node& node, const Actor& actor, const std::string& name) {
  if (node.last_run.count && !actor.clock().covers(node.last_run))
    hazard("task group updated while an earlier replay may still run it: " + name);
}

void run_node(Node& node, Actor& actor) {
  Task task;
  {
    std::lock_guard lock(node.mutex);
    task = node.task;
    if (node.last_update.count && !actor.clock().covers(node.last_update))
      hazard("task group replayed without an ordering edge to its update: " + task.name +
             " (missing external event)");
  }
  run_task(task, actor);
  std::lock_guard lock(node.mutex);
  node.last_run = {actor.id(), actor.clock().at(actor.id())};
}

void replay(Graph& graph, Actor& replaying) {
  for (auto& node : graph.nodes) {
    auto& branch = graph.branches[node->branch];
    run_node(*node, branch.actor ? *branch.actor : replaying);
  }
}

aclError execute(aclmdlRI handle, Stream& stream) {
  auto graph = find(handle);
  if (!graph) return misuse(acl::kInvalidHandle, "replay of an unknown or destroyed graph");
  if (graph->is_active || graph->is_invalid)
    return misuse(acl::kInvalidParameter, "replay of a graph whose capture didn't complete");
  ++counters().graph_launches;
  for (auto& node : graph->nodes)
    if (node->task.on_enqueue) node->task.on_enqueue();
  Task task;
  task.name = "replay of graph " + std::to_string(graph->id);
  task.run = [graph](Actor& actor) { replay(*graph, actor); };
  return enqueue(stream, std::move(task));
}

aclError end_update(Stream& stream) {
  auto* group = stream.updated_group;
  if (!group) return misuse(acl::kTaskGroupStatus, "end of a task-group update that didn't begin");
  stream.updated_group = nullptr;
  if (stream.next_update == group->nodes.size()) return acl::kSuccess;
  return misuse(acl::kTaskGroupStatus,
                "task-group update issued " + std::to_string(stream.next_update) + " tasks, " +
                    std::to_string(group->nodes.size()) + " were captured");
}

// torch_npu warns once and goes on: what should have been an update runs as ordinary tasks.
aclError refuse_update() {
  return misuse(acl::kNotSupported, "task groups are updated with driver 25.0.RC1 or later, this is " +
                                        options().driver);
}

}  // namespace

aclError record_capture(Stream& stream, Task task) {
  auto& graph = *stream.capture;
  auto& branch = graph.branches[stream.branch];
  branch.seen.set(stream.branch, ++branch.tasks);
  if (task.is_work) branch.last_work = branch.tasks;
  auto node = std::make_shared<Node>();
  node->task = std::move(task);
  node->branch = stream.branch;
  if (stream.open_group) stream.open_group->nodes.push_back(node);
  graph.nodes.push_back(std::move(node));
  return acl::kSuccess;
}

aclError record_update(Stream& stream, Task task) {
  auto& group = *stream.updated_group;
  if (stream.next_update >= group.nodes.size())
    return misuse(acl::kTaskGroupStatus, "task-group update issues more tasks than were captured");
  auto node = group.nodes[stream.next_update++];
  std::lock_guard lock(node->mutex);
  if (node->task.name != task.name)
    return misuse(acl::kCannotUpdate, "task-group update issues " + task.name + " where " +
                                          node->task.name + " was captured");
  Task update;
  update.name = "update of " + task.name;
  update.run = [node, task = std::move(task)](Actor& actor) {
    std::lock_guard node_lock(node->mutex);
    check_update_order(*node, actor, task.name);
    node->last_update = {actor.id(), actor.clock().at(actor.id())};
    node->task = task;
  };
  stream.push(std::move(update));
  return acl::kSuccess;
}

aclError join_capture(Stream& stream, Graph* handle, const void* recording) {
  auto graph = find(handle);
  if (!graph || !graph->is_active)
    return misuse(acl::kEventCaptured, "wait for an event that was recorded in an ended capture");
  if (stream.capture && stream.capture != graph.get())
    return misuse(acl::kStreamCaptured, stream.label + " is captured by another graph");
  if (!stream.capture) {
    if (const auto error = add_branch(*graph, stream)) {
      invalidate(*graph);
      return error;
    }
  }
  graph->branches[stream.branch].seen.join(graph->records[recording]);
  return acl::kSuccess;
}

void note_captured_record(Stream& stream, const void* recording) {
  stream.capture->records[recording] = stream.capture->branches[stream.branch].seen;
}

Graph::~Graph() {
  for (const auto& [held, count] : streams_held) give_streams(held.first, count, held.second);
}

aclError communicate_in_capture(Graph& graph, const void* group) {
  if (!graph.groups.insert(group).second) return acl::kSuccess;
  const int device = graph.branches.front().stream->device, count = options().hccl_streams;
  if (const auto error = take_streams(device, count, StreamUse::kCommunication,
                                      "communication in a captured graph"))
    return error;
  graph.streams_held[{device, StreamUse::kCommunication}] += count;
  return acl::kSuccess;
}

void invalidate(Graph& graph) { graph.is_invalid = true; }

bool forbidden_by_capture() {
  return graphs().active_global > 0 && thread_mode != acl::kModeRelaxed;
}

}  // namespace emulator

using namespace emulator;

ACL_API aclError aclmdlRICaptureBegin(aclrtStream stream, int mode) {
  EMULATOR_STREAM_CALL(stream);
  return begin_capture(stream_of(stream), mode);
}

ACL_API aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI* out) {
  EMULATOR_STREAM_CALL(stream);
  return end_capture(stream_of(stream), out);
}

ACL_API aclError aclmdlRICaptureGetInfo(aclrtStream stream, int* status, aclmdlRI* out) {
  EMULATOR_CALL();
  const auto* graph = stream_of(stream).capture;
  if (status) {
    *status = !graph               ? acl::kCaptureNone
              : graph->is_invalid ? acl::kCaptureInvalid
                                   : acl::kCaptureActive;
  }
  if (out) *out = const_cast<Graph*>(graph);
  return acl::kSuccess;
}

ACL_API aclError aclmdlRICaptureThreadExchangeMode(int* mode) {
  EMULATOR_DEVICE_CALL();
  std::swap(thread_mode, *mode);
  return acl::kSuccess;
}

ACL_API aclError aclmdlRIExecuteAsync(aclmdlRI graph, aclrtStream stream) {
  EMULATOR_DEVICE_CALL();
  return execute(graph, stream_of(stream));
}

ACL_API aclError aclmdlRIDestroy(aclmdlRI graph) {
  EMULATOR_DEVICE_CALL();
  if (forget(graph)) return acl::kSuccess;
  return misuse(acl::kInvalidHandle, "destruction of an unknown or destroyed graph");
}

ACL_API aclError aclmdlRIGetId(aclmdlRI graph, uint32_t* id) {
  EMULATOR_CALL();
  *id = static_cast<Graph*>(graph)->id;
  return acl::kSuccess;
}

ACL_API aclError aclmdlRIDebugPrint(aclmdlRI handle) {
  EMULATOR_CALL();
  for (const auto& node : static_cast<Graph*>(handle)->nodes)
    say("graph: branch %d %s", node->branch, node->task.name.c_str());
  return acl::kSuccess;
}

ACL_API aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  EMULATOR_STREAM_CALL(handle);
  auto& stream = stream_of(handle);
  if (!stream.capture) return misuse(acl::kStreamNotCaptured, "task group outside a capture");
  if (stream.open_group) return misuse(acl::kTaskGroupStatus, "task group inside a task group");
  stream.open_group = new TaskGroup;  // the handle has no destroy call
  return acl::kSuccess;
}

ACL_API aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* out) {
  EMULATOR_STREAM_CALL(handle);
  auto& stream = stream_of(handle);
  if (!stream.open_group) return misuse(acl::kTaskGroupStatus, "end of a task group never begun");
  *out = stream.open_group;
  stream.open_group = nullptr;
  return acl::kSuccess;
}

ACL_API aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
  EMULATOR_STREAM_CALL(handle);
  if (!driver_updates_tasks()) return refuse_update();
  auto& stream = stream_of(handle);
  if (stream.capture)
    return misuse(acl::kStreamCaptured, "task-group update on a stream that is captured");
  stream.updated_group = static_cast<TaskGroup*>(group);
  stream.next_update = 0;
  return acl::kSuccess;
}

ACL_API aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
  EMULATOR_STREAM_CALL(stream);
  if (!driver_updates_tasks()) return refuse_update();
  return end_update(stream_of(stream));
}
