// What operators do that exchange rows between ranks themselves. The launcher orders them by their
// communicator; their references, on a worker, call the other functions, with memory as the host sees
// it. A result of 0 is success; else the communicator has failed, which is reported as a fault.
#include <cstdio>
#include <cstring>
#include <vector>

#include "communicator.h"
#include "elements.h"

namespace hccl {

Transfer part_of_exchange(bool is_send, int peer, char* bytes, size_t size, uint32_t type,
                          const char* kernel) {
  Call call{"", 0, size / width_of(type), 0, type, 0, static_cast<uint32_t>(peer), kHasPeer};
  std::snprintf(call.name, sizeof call.name, "%s", kernel);
  return {is_send, peer, bytes, size, call};
}

}  // namespace hccl

using namespace hccl;

HCCL_API void* emulator_hccl_find(const char* name) { return find_named(name).get(); }

HCCL_API int emulator_hccl_place(const char* name, int* rank) {
  const auto comm = find_named(name);
  if (!comm) return 0;
  *rank = comm->rank();
  return comm->count();
}

// Every rank gets `bytes` of each rank, one after the other.
HCCL_API int emulator_hccl_gather(const char* name, const char* kernel, const void* from,
                                  uint64_t bytes, void* to) {
  const auto comm = find_named(name);
  if (!comm) return kParameter;
  Call call{};
  std::snprintf(call.name, sizeof call.name, "%s", kernel);
  call.count = bytes;
  call.type = kUint8;
  bool ok = false;
  comm->note_queued();
  comm->collective(call, [&] {
    return ok = comm->all_gather(static_cast<const char*>(from), static_cast<char*>(to), bytes);
  });
  comm->note_finished();
  return ok ? kSuccess : kRemote;
}

// Bytes for each rank, one after the other, and those of each rank, in the same order.
HCCL_API int emulator_hccl_exchange(const char* name, const char* kernel, const void* from,
                                    const uint64_t* sends, void* to, const uint64_t* receives) {
  const auto comm = find_named(name);
  if (!comm) return kParameter;
  const int ranks = comm->count();
  const std::vector<uint64_t> sent(sends, sends + ranks), received(receives, receives + ranks);
  Call call{};
  std::snprintf(call.name, sizeof call.name, "%s", kernel);
  call.type = kUint8;
  call.has = kHasCounts;
  bool ok = false;
  comm->note_queued();
  comm->collective(
      call,
      [&] {
        std::vector<Transfer> items;
        auto* source = static_cast<char*>(const_cast<void*>(from));
        auto* target = static_cast<char*>(to);
        for (int r = 0; r < ranks; source += sent[r], target += received[r], ++r) {
          if (r == comm->rank()) {
            std::memcpy(target, source, sent[r]);
            continue;
          }
          items.push_back(part_of_exchange(true, r, source, sent[r], kUint8, kernel));
          items.push_back(part_of_exchange(false, r, target, received[r], kUint8, kernel));
        }
        return ok = comm->exchange(items);
      },
      &sent, &received);
  comm->note_finished();
  return ok ? kSuccess : kRemote;
}
