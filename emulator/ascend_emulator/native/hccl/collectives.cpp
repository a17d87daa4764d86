// HCCL's functions: each checks its arguments at the call, and launches its work on the stream.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../runtime_api.h"
#include "communicator.h"
#include "elements.h"

namespace hccl {
namespace {

// Kept by the tasks on streams and in graphs, too, which may run after HcclCommDestroy.
using Handle = std::shared_ptr<Communicator>;

struct Handles {
  std::mutex mutex;
  std::map<void*, Handle> live;
};

Handles& handles() {
  static Handles& instance = *new Handles;
  return instance;
}

Result refuse(Result status, const std::string& message) {
  emulator_misuse(status, message.c_str());
  return status;
}

Handle find(void* handle) {
  std::lock_guard lock(handles().mutex);
  auto it = handles().live.find(handle);
  return it == handles().live.end() ? nullptr : it->second;
}

// One call of the program, while its arguments are checked.
struct Request {
  const char* kernel;
  Handle comm;
  void* stream;
  Call call{};
  std::vector<emulator_access> accesses;
  Result status = kSuccess;

  Request(const char* name, void* handle, void* on_stream)
      : kernel(name), comm(find(handle)), stream(on_stream) {
    std::snprintf(call.name, sizeof call.name, "%s", name);
    if (!comm) status = refuse(kParameter, kernel + std::string(" on an unknown or destroyed "
                                                                "communicator"));
  }

  void fail(Result result, const std::string& why) {
    if (!status) status = refuse(result, comm->task_name(kernel) + ": " + why);
  }

  void elements(uint64_t count, uint32_t type) {
    call.count = count;
    call.type = type;
    if (!width_of(type)) fail(kParameter, name_of_type(type) + " is unknown");
  }

  void reduction(uint32_t type, uint32_t op) {
    call.op = op;
    call.has |= kHasOp;
    if (const auto why = why_no_reduction(type, op); !why.empty())
      fail(kNotSupported,
           name_of_reduction(op) + " of " + name_of_type(type) + " is not supported: " + why);
  }

  void root(uint32_t rank) {
    call.root = rank;
    call.has |= kHasRoot;
    if (comm && rank >= static_cast<uint32_t>(comm->count()))
      fail(kParameter, "root " + std::to_string(rank) + " is no rank of " +
                           std::to_string(comm->count()));
  }

  // `bytes` of device memory at `address`, which the call reads or writes.
  void memory(const void* address, size_t bytes, bool write) {
    if (!bytes || status) return;
    if (!emulator_is_allocated(address, bytes))
      return fail(kPointer, std::string(write ? "its target" : "its source") + " of " +
                                std::to_string(bytes) + " bytes is not device memory");
    if (const auto width = width_of(call.type); reinterpret_cast<uintptr_t>(address) % width)
      return fail(kParameter, std::string(write ? "its target" : "its source") +
                                  " is not aligned to " + std::to_string(width) + " bytes");
    accesses.push_back({static_cast<const char*>(address), bytes, write});
  }

  void apart(const void* from, const void* to) {
    if (from == to && from) fail(kParameter, "source and target must not be the same");
  }

  // Calls of one communicator share its buffers, so the program has to order them.
  Result launch(std::function<void(const Call&)> work) {
    if (status) return status;
    if (emulator_note_communication(stream, comm.get())) return kRuntime;  // no streams are left
    const bool is_captured = emulator_is_capturing(stream);
    if (is_captured)
      call.capture = comm->next_capture();
    else
      comm->note_queued();
    accesses.push_back({reinterpret_cast<const char*>(comm.get()), 1, true});
    const auto name = comm->task_name(kernel);
    using Run = std::function<void()>;
    auto* run = new Run([call = call, comm = comm, is_captured, work = std::move(work)] {
      work(call);
      if (!is_captured) comm->note_finished();
    });
    const int error = emulator_launch_collective(
        stream, kernel, name.c_str(), [](void* each) { (*static_cast<Run*>(each))(); },
        [](void* each) { delete static_cast<Run*>(each); }, run, accesses.data(), accesses.size());
    return error ? kInternal : kSuccess;
  }
};

char* bytes_of(const void* address) {
  return static_cast<char*>(emulator_alias(const_cast<void*>(address)));
}

using Body = std::function<bool(Communicator&)>;
using Counts = std::vector<uint64_t>;

Result launch_collective(Request& request, Body body, Counts sends = {}, Counts receives = {}) {
  if (!request.status && !sends.empty()) request.call.has |= kHasCounts;
  return request.launch([comm = request.comm, body = std::move(body), sends = std::move(sends),
                         receives = std::move(receives)](const Call& call) {
    comm->collective(call, [&] { return body(*comm); }, sends.empty() ? nullptr : &sends,
                     receives.empty() ? nullptr : &receives);
  });
}

// The counts or displacements of all ranks, in bytes.
Counts in_bytes(const void* numbers, int count, size_t width) {
  const auto* values = static_cast<const uint64_t*>(numbers);
  Counts out;
  for (int r = 0; r < count; ++r) out.push_back(values[r] * width);
  return out;
}

void pieces(Request& request, const void* base, const Counts& sizes, const Counts& offsets,
            bool write) {
  for (size_t r = 0; r < sizes.size(); ++r)
    request.memory(static_cast<const char*>(base) + offsets[r], sizes[r], write);
}

Result all_to_all(Request& request, const void* from, const Counts& sends, const Counts& send_at,
                  const void* to, const Counts& receives, const Counts& receive_at) {
  request.apart(from, to);
  pieces(request, from, sends, send_at, false);
  pieces(request, to, receives, receive_at, true);
  const uint32_t type = request.call.type;
  return launch_collective(
      request,
      [=](Communicator& comm) {
        std::vector<Transfer> items;
        for (int r = 0; r < comm.count(); ++r) {
          char *source = bytes_of(from) + send_at[r], *target = bytes_of(to) + receive_at[r];
          if (r == comm.rank()) {
            std::memcpy(target, source, sends[r]);
            continue;
          }
          items.push_back(part_of_exchange(true, r, source, sends[r], type, "HcclAlltoAll"));
          items.push_back(part_of_exchange(false, r, target, receives[r], type, "HcclAlltoAll"));
        }
        return comm.exchange(items);
      },
      sends, receives);
}

// Sends and receives between HcclGroupStart and HcclGroupEnd are launched together.
struct Pending {
  Handle comm;
  void* stream;
  std::vector<Transfer> items;
  std::vector<emulator_access> accesses;
};
thread_local int open_groups = 0;
thread_local std::vector<Pending> group;

Result launch_transfers(Request& request, std::vector<Transfer> items) {
  const char* kernel = request.kernel;
  return request.launch([comm = request.comm, items = std::move(items), kernel](const Call& call) {
    auto turn = items;
    for (auto& item : turn) {
      item.bytes = bytes_of(item.bytes);
      item.call.capture = call.capture;
    }
    comm->transfers(kernel, std::move(turn));
  });
}

// A send or receive as one item; its memory is checked and noted in the request.
Transfer transfer(Request& request, bool is_send, void* buffer, uint64_t count, uint32_t type,
                  uint32_t peer) {
  request.elements(count, type);
  const size_t size = count * width_of(type);
  if (!request.status && (peer >= static_cast<uint32_t>(request.comm->count()) ||
                          static_cast<int>(peer) == request.comm->rank()))
    request.fail(kParameter, "rank " + std::to_string(peer) + " is no other rank of " +
                                 std::to_string(request.comm->count()));
  request.memory(buffer, size, !is_send);
  Transfer out{is_send, static_cast<int>(peer), static_cast<char*>(buffer), size, {}};
  out.call.count = count;
  out.call.type = type;
  out.call.root = peer;
  out.call.has = kHasPeer;
  std::snprintf(out.call.name, sizeof out.call.name, "%s", is_send ? "HcclSend" : "HcclRecv");
  return out;
}

Result one_transfer(Request& request, Transfer item) {
  request.call.root = item.call.root;
  request.call.has = kHasPeer;
  if (request.status) return request.status;
  if (!open_groups) return launch_transfers(request, {item});
  for (auto& pending : group) {
    if (pending.comm != request.comm || pending.stream != request.stream) continue;
    pending.items.push_back(item);
    pending.accesses.insert(pending.accesses.end(), request.accesses.begin(),
                            request.accesses.end());
    return kSuccess;
  }
  group.push_back({request.comm, request.stream, {item}, request.accesses});
  return kSuccess;
}

// vllm-project/vllm-ascend leaves 40 streams to each communication group when it counts those that
// graphs may take (vllm_ascend/utils.py, v0.18).
constexpr int kStreams = 40;
constexpr uint32_t kBufferMegabytes = 200;

// Two buffers of HCCL_BUFFSIZE, and streams; the result is the status.
Result take_resources(uint32_t megabytes, const std::string& name, Resources& out) {
  if (const char* text = std::getenv("HCCL_BUFFSIZE"); megabytes == kNotSet && text && *text)
    megabytes = static_cast<uint32_t>(std::strtoul(text, nullptr, 10));
  if (megabytes == kNotSet || megabytes == 0) megabytes = kBufferMegabytes;
  const auto whose = "communicator " + (name.empty() ? "without a name" : name);
  if (aclrtMallocAlign32(&out.buffers, (size_t{2} * megabytes) << 20, 0))
    return refuse(kOutOfMemory, "HCCL: " + whose + " needs 2 x " + std::to_string(megabytes) +
                                    " MB of npu:" + std::to_string(out.device) +
                                    ", which has less left: lower HCCL_BUFFSIZE, or leave room");
  if (emulator_take_streams(out.device, kStreams, whose.c_str())) return kRuntime;
  out.streams = kStreams;
  return kSuccess;
}

Result initialise(uint32_t count, const char* root, uint32_t rank, const Config* config,
                  void** out) {
  if (!root || !out) return refuse(kPointer, "HCCL: communicator without root info");
  Resources resources;
  int32_t device = 0;
  if (aclrtGetDevice(&resources.device) ||
      aclrtGetLogicDevIdByUserDevId(resources.device, &device))
    return refuse(kInternal, "HCCL: rank " + std::to_string(rank) +
                                 " joins without a device (torch.npu.set_device)");
  std::string name, why;
  const bool has_name = config && config->size >= offsetof(Config, name) + kNameBytes;
  if (has_name) name.assign(config->name, strnlen(config->name, kNameBytes - 1));
  Result status = take_resources(config ? config->buffer_megabytes : kNotSet, name, resources);
  Segment* segment = nullptr;
  if (!status) {
    segment = Segment::join(root, static_cast<int>(count), static_cast<int>(rank), device, name,
                            &status, &why);
    if (!segment) refuse(status, why);
  }
  if (status) {
    resources.give_back();
    return status;
  }
  auto comm = std::make_shared<Communicator>(segment, resources);
  *out = comm.get();
  const auto label = "the buffers of communicator " + segment->name();
  emulator_name_object(comm.get(), label.c_str());
  std::lock_guard lock(handles().mutex);
  handles().live[comm.get()] = comm;
  return kSuccess;
}

}  // namespace

std::shared_ptr<Communicator> find_named(const std::string& name) {
  std::lock_guard lock(handles().mutex);
  for (const auto& [_, comm] : handles().live)
    if (comm->segment().name() == name) return comm;
  return nullptr;
}

}  // namespace hccl

using namespace hccl;

HCCL_API int HcclGetRootInfo(char* root) {
  if (!root) return refuse(kPointer, "HcclGetRootInfo without a place for the result");
  return Segment::make_root(root);
}

HCCL_API int HcclCommInitRootInfo(uint32_t count, const char* root, uint32_t rank, void** out) {
  return initialise(count, root, rank, nullptr, out);
}

HCCL_API int HcclCommInitRootInfoConfig(uint32_t count, const char* root, uint32_t rank,
                                        const Config* config, void** out) {
  return initialise(count, root, rank, config, out);
}

HCCL_API int HcclCommDestroy(void* handle) {
  Handle comm;
  {
    std::lock_guard lock(handles().mutex);
    auto it = handles().live.find(handle);
    if (it != handles().live.end()) {
      comm = std::move(it->second);
      handles().live.erase(it);
    }
  }
  if (!comm) return refuse(kParameter, "HcclCommDestroy of an unknown or destroyed communicator");
  comm->destroy();
  return kSuccess;
}

// Feature numbers below this one exist: buffer size, determinism, the communicator's name.
HCCL_API uint32_t HcclGetCommConfigCapability() { return 3; }

HCCL_API int HcclSetConfig(int, int) { return kSuccess; }  // reductions are deterministic anyway

// torch_npu asks every second, and ends the process when it gets an error. A failure that no sync
// of the program reported within some seconds is one: the program waits for something else.
HCCL_API int HcclGetCommAsyncError(void* handle, int* error) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kGrace = std::chrono::seconds(5);
  static std::mutex& mutex = *new std::mutex;
  static Clock::time_point noticed;
  const auto comm = find(handle);
  *error = kSuccess;
  if (!comm || !comm->segment().has_failed()) return kSuccess;
  std::lock_guard lock(mutex);
  if (!emulator_fault_is_pending()) {
    noticed = {};
    return kSuccess;
  }
  if (noticed == Clock::time_point{}) noticed = Clock::now();
  if (Clock::now() - noticed < kGrace) return kSuccess;
  *error = kRemote;
  refuse(kRemote, comm->segment().failure());
  return kSuccess;
}

HCCL_API const char* HcclGetErrorString(int code) {
  switch (code) {
    case kSuccess: return "no error";
    case kParameter: return "parameter error";
    case kPointer: return "empty pointer";
    case kNotSupported: return "not supported";
    case kTimeout: return "timeout";
    case kRemote: return "remote error";
    case kOutOfMemory: return "out of memory";
    default: return "internal error";
  }
}

HCCL_API int HcclGetCommName(void* handle, char* name) {
  const auto comm = find(handle);
  if (!comm) return refuse(kParameter, "HcclGetCommName of an unknown or destroyed communicator");
  std::snprintf(name, kNameBytes, "%s", comm->segment().name().c_str());
  return kSuccess;
}

HCCL_API int HcclGetRankSize(void* handle, uint32_t* count) {
  const auto comm = find(handle);
  if (!comm) return refuse(kParameter, "HcclGetRankSize of an unknown or destroyed communicator");
  *count = static_cast<uint32_t>(comm->count());
  return kSuccess;
}

HCCL_API int HcclGetRankId(void* handle, uint32_t* rank) {
  const auto comm = find(handle);
  if (!comm) return refuse(kParameter, "HcclGetRankId of an unknown or destroyed communicator");
  *rank = static_cast<uint32_t>(comm->rank());
  return kSuccess;
}

HCCL_API int HcclAllReduce(void* from, void* to, uint64_t count, uint32_t type, uint32_t op,
                           void* handle, void* stream) {
  Request request("HcclAllReduce", handle, stream);
  request.elements(count, type);
  request.reduction(type, op);
  const size_t bytes = count * width_of(type);
  request.memory(from, bytes, false);
  request.memory(to, bytes, true);
  return launch_collective(request, [=](Communicator& comm) {
    return comm.all_reduce(bytes_of(from), bytes_of(to), count, type, op);
  });
}

HCCL_API int HcclReduce(void* from, void* to, uint64_t count, uint32_t type, uint32_t op,
                        uint32_t root, void* handle, void* stream) {
  Request request("HcclReduce", handle, stream);
  request.elements(count, type);
  request.reduction(type, op);
  request.root(root);
  const size_t bytes = count * width_of(type);
  const bool is_root = !request.status && static_cast<int>(root) == request.comm->rank();
  request.memory(from, bytes, false);
  if (is_root) request.memory(to, bytes, true);
  return launch_collective(request, [=](Communicator& comm) {
    return comm.reduce(bytes_of(from), bytes_of(to), count, type, op, static_cast<int>(root));
  });
}

HCCL_API int HcclAllGather(void* from, void* to, uint64_t count, uint32_t type, void* handle,
                           void* stream) {
  Request request("HcclAllGather", handle, stream);
  request.elements(count, type);
  const size_t bytes = count * width_of(type);
  request.memory(from, bytes, false);
  if (request.comm) request.memory(to, bytes * request.comm->count(), true);
  return launch_collective(request, [=](Communicator& comm) {
    return comm.all_gather(bytes_of(from), bytes_of(to), bytes);
  });
}

HCCL_API int HcclAllGatherV(void* from, uint64_t count, void* to, const void* counts,
                            const void* displacements, uint32_t type, void* handle, void* stream) {
  Request request("HcclAllGatherV", handle, stream);
  request.elements(count, type);
  if (request.status) return request.status;
  const int ranks = request.comm->count();
  const size_t width = width_of(type);
  const auto sizes = in_bytes(counts, ranks, width), at = in_bytes(displacements, ranks, width);
  request.call.count = 0;  // differs by rank
  request.apart(from, to);
  request.memory(from, count * width, false);
  pieces(request, to, sizes, at, true);
  return launch_collective(
      request,
      [=](Communicator& comm) {
        return comm.all_gather_uneven(bytes_of(from), bytes_of(to), sizes, at);
      },
      Counts(ranks, count * width), sizes);
}

HCCL_API int HcclReduceScatter(void* from, void* to, uint64_t count, uint32_t type, uint32_t op,
                               void* handle, void* stream) {
  Request request("HcclReduceScatter", handle, stream);
  request.elements(count, type);
  request.reduction(type, op);
  const size_t bytes = count * width_of(type);
  if (request.comm) request.memory(from, bytes * request.comm->count(), false);
  request.memory(to, bytes, true);
  return launch_collective(request, [=](Communicator& comm) {
    return comm.reduce_scatter(bytes_of(from), bytes_of(to), count, type, op);
  });
}

HCCL_API int HcclReduceScatterV(void* from, const void* counts, const void* displacements, void* to,
                                uint64_t count, uint32_t type, uint32_t op, void* handle,
                                void* stream) {
  Request request("HcclReduceScatterV", handle, stream);
  request.elements(count, type);
  request.reduction(type, op);
  if (request.status) return request.status;
  if (op == kProduct) request.fail(kNotSupported, "it has sum, max and min");
  const int ranks = request.comm->count();
  const size_t width = width_of(type);
  const auto sizes = in_bytes(counts, ranks, width), at = in_bytes(displacements, ranks, width);
  request.call.count = 0;  // differs by rank
  request.apart(from, to);
  pieces(request, from, sizes, at, false);
  request.memory(to, count * width, true);
  return launch_collective(
      request,
      [=](Communicator& comm) {
        for (int r = 0; r < comm.count(); ++r)
          if (!comm.reduce(bytes_of(from) + at[r], bytes_of(to), sizes[r] / width, type, op, r))
            return false;
        return true;
      },
      sizes, Counts(ranks, count * width));
}

HCCL_API int HcclBroadcast(void* buffer, uint64_t count, uint32_t type, uint32_t root, void* handle,
                           void* stream) {
  Request request("HcclBroadcast", handle, stream);
  request.elements(count, type);
  request.root(root);
  const size_t bytes = count * width_of(type);
  const bool is_root = !request.status && static_cast<int>(root) == request.comm->rank();
  request.memory(buffer, bytes, !is_root);
  return launch_collective(request, [=](Communicator& comm) {
    return comm.broadcast(bytes_of(buffer), bytes, static_cast<int>(root));
  });
}

HCCL_API int HcclScatter(void* from, void* to, uint64_t count, uint32_t type, uint32_t root,
                         void* handle, void* stream) {
  Request request("HcclScatter", handle, stream);
  request.elements(count, type);
  request.root(root);
  const size_t bytes = count * width_of(type);
  const bool is_root = !request.status && static_cast<int>(root) == request.comm->rank();
  if (is_root) request.memory(from, bytes * request.comm->count(), false);
  request.memory(to, bytes, true);
  return launch_collective(request, [=](Communicator& comm) {
    return comm.scatter(bytes_of(from), bytes_of(to), bytes, static_cast<int>(root));
  });
}

HCCL_API int HcclBarrier(void* handle, void* stream) {
  Request request("HcclBarrier", handle, stream);
  request.elements(0, kUint8);
  return launch_collective(request, [](Communicator&) { return true; });
}

HCCL_API int HcclAlltoAll(const void* from, uint64_t send_count, uint32_t send_type, const void* to,
                          uint64_t receive_count, uint32_t receive_type, void* handle,
                          void* stream) {
  Request request("HcclAlltoAll", handle, stream);
  request.elements(send_count, send_type);
  if (request.status) return request.status;
  const int ranks = request.comm->count();
  if (send_type != receive_type || send_count != receive_count)
    request.fail(kParameter, "it sends " + std::to_string(send_count) + " of " +
                                 name_of_type(send_type) + " and receives " +
                                 std::to_string(receive_count) + " of " +
                                 name_of_type(receive_type));
  const size_t bytes = send_count * width_of(send_type);
  Counts offsets;
  for (int r = 0; r < ranks; ++r) offsets.push_back(r * bytes);
  return all_to_all(request, from, Counts(ranks, bytes), offsets, to, Counts(ranks, bytes),
                    offsets);
}

HCCL_API int HcclAlltoAllV(const void* from, const void* send_counts, const void* send_at,
                           uint32_t send_type, const void* to, const void* receive_counts,
                           const void* receive_at, uint32_t receive_type, void* handle,
                           void* stream) {
  Request request("HcclAlltoAllV", handle, stream);
  request.elements(0, send_type);
  request.elements(0, receive_type);
  if (request.status) return request.status;
  if (send_type != receive_type)
    request.fail(kParameter, "it sends " + name_of_type(send_type) + " and receives " +
                                 name_of_type(receive_type));
  const int ranks = request.comm->count();
  const size_t width = width_of(send_type);
  return all_to_all(request, from, in_bytes(send_counts, ranks, width),
                    in_bytes(send_at, ranks, width), to, in_bytes(receive_counts, ranks, width),
                    in_bytes(receive_at, ranks, width));
}

HCCL_API int HcclSend(void* buffer, uint64_t count, uint32_t type, uint32_t peer, void* handle,
                      void* stream) {
  Request request("HcclSend", handle, stream);
  return one_transfer(request, transfer(request, true, buffer, count, type, peer));
}

HCCL_API int HcclRecv(void* buffer, uint64_t count, uint32_t type, uint32_t peer, void* handle,
                      void* stream) {
  Request request("HcclRecv", handle, stream);
  return one_transfer(request, transfer(request, false, buffer, count, type, peer));
}

HCCL_API int HcclBatchSendRecv(const Item* items, uint32_t count, void* handle, void* stream) {
  Request request("HcclBatchSendRecv", handle, stream);
  std::vector<Transfer> transfers;
  for (uint32_t i = 0; i < count && !request.status; ++i)
    transfers.push_back(transfer(request, items[i].kind == 0, items[i].buffer, items[i].count,
                                 items[i].type, items[i].peer));
  if (request.status) return request.status;
  return launch_transfers(request, std::move(transfers));
}

HCCL_API int HcclGroupStart() {
  ++open_groups;
  return kSuccess;
}

HCCL_API int HcclGroupEnd() {
  if (!open_groups) return refuse(kParameter, "HcclGroupEnd without HcclGroupStart");
  if (--open_groups) return kSuccess;
  auto pending = std::move(group);
  group.clear();
  int status = kSuccess;
  for (auto& each : pending) {
    Request request("HcclBatchSendRecv", each.comm.get(), each.stream);
    request.accesses = std::move(each.accesses);
    if (const int error = launch_transfers(request, std::move(each.items))) status = error;
  }
  return status;
}
