// Payloads go through each rank's slot in pieces: a rank writes its piece, all meet at a barrier,
// all read. A slot holds two pieces in turn, so that one barrier for each piece is enough: whoever
// writes piece n has passed the barrier of piece n - 1, which nobody reaches before having read
// piece n - 2. The signatures of calls alternate for the same reason.
#include "communicator.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "../runtime_api.h"
#include "elements.h"

namespace hccl {
namespace {

// Below this every rank reduces everything: a second barrier would cost more.
constexpr size_t kShareWorkFrom = 32 << 10;

std::atomic<int> busy{0};  // communicators of this process that are in a collective or transfer

void enter(Rank& rank, const Call& call) {
  rank.doing = call;
  rank.is_busy = 1;
  ++busy;
}

void leave(Rank& rank) {
  rank.is_busy = 0;
  --busy;
}

bool same(const Call& a, const Call& b) {
  return !std::strcmp(a.name, b.name) && a.count == b.count && a.type == b.type && a.op == b.op &&
         a.root == b.root && a.capture == b.capture;
}

}  // namespace

void Resources::give_back() {
  if (buffers) aclrtFree(buffers);
  if (streams) emulator_give_streams(device, streams);
  *this = {};
}

Communicator::Communicator(Segment* segment, Resources resources)
    : segment_(segment), resources_(resources) {}

Communicator::~Communicator() = default;

std::string Communicator::task_name(const char* kernel) const {
  return std::string(kernel) + " of rank " + std::to_string(rank()) + " of " +
         std::to_string(count()) + " in " + segment_->name();
}

void Communicator::destroy() {
  if (is_destroyed_.exchange(true)) return;
  if (const int left = pending_.load(); left > 0 && !segment_->has_failed()) {
    const auto message = "HCCL, communicator " + segment_->name() + ": rank " +
                         std::to_string(rank()) + " destroyed it while " + std::to_string(left) +
                         (left == 1 ? " call" : " calls") + " had not ended; rank " +
                         std::to_string(rank()) + " " + segment_->activity_of(rank());
    segment_->fail(message);
    emulator_fault(message.c_str());
  }
  segment_->leave();
  resources_.give_back();
}

bool Communicator::report(const Call& call) {
  std::string message;
  if (segment_->has_failed())
    message = segment_->failure();
  else if (is_destroyed_)
    message = "HCCL, communicator " + segment_->name() + ": rank " + std::to_string(rank()) +
              " runs " + describe(call) + " after having destroyed the communicator";
  else
    return false;
  emulator_fault(message.c_str());
  return true;
}

void Communicator::collective(Call call, const std::function<bool()>& body,
                              const std::vector<uint64_t>* send_counts,
                              const std::vector<uint64_t>* receive_counts) {
  std::lock_guard turn(turn_);
  call.number = ++number_;
  if (report(call)) return;
  enter(segment_->own(), call);
  const bool ok = agree(call, send_counts, receive_counts) && body();
  leave(segment_->own());
  if (!ok) report(call);
}

bool Communicator::agree(const Call& call, const std::vector<uint64_t>* send_counts,
                         const std::vector<uint64_t>* receive_counts) {
  const auto turn = call.number % kPieces;
  auto& own = segment_->own();
  own.calls[turn] = call;
  if (send_counts) std::copy(send_counts->begin(), send_counts->end(), own.send_counts[turn]);
  if (receive_counts)
    std::copy(receive_counts->begin(), receive_counts->end(), own.receive_counts[turn]);
  if (!segment_->barrier()) return false;
  const auto& first = segment_->rank_at(0).calls[turn];
  for (int r = 1; r < count(); ++r) {
    const auto& other = segment_->rank_at(r).calls[turn];
    if (same(first, other)) continue;
    segment_->fail("HCCL, communicator " + segment_->name() + ": ranks 0 and " + std::to_string(r) +
                   " disagree: rank 0 calls " + describe(first) + ", rank " + std::to_string(r) +
                   " calls " + describe(other));
    return false;
  }
  return !(call.has & kHasCounts) || counts_agree(call);
}

// What a rank sends must be what the other receives; the sums of uneven gathers and scatters are
// checked in the same way, since each rank gives the counts of all.
bool Communicator::counts_agree(const Call& call) {
  const auto turn = call.number % kPieces;
  for (int from = 0; from < count(); ++from) {
    for (int to = 0; to < count(); ++to) {
      const uint64_t sent = segment_->rank_at(from).send_counts[turn][to];
      const uint64_t received = segment_->rank_at(to).receive_counts[turn][from];
      if (sent == received) continue;
      segment_->fail("HCCL, communicator " + segment_->name() + ": the counts of " +
                     describe(call) + " disagree: rank " + std::to_string(from) + " gives rank " +
                     std::to_string(to) + " " + std::to_string(sent) + " bytes, rank " +
                     std::to_string(to) + " expects " + std::to_string(received) + " bytes of it");
      return false;
    }
  }
  return true;
}

bool Communicator::all_gather(const char* from, char* to, size_t bytes) {
  return all_gather_uneven(from, to, std::vector<uint64_t>(count(), bytes), [&] {
    std::vector<uint64_t> offsets;
    for (int r = 0; r < count(); ++r) offsets.push_back(r * bytes);
    return offsets;
  }());
}

bool Communicator::all_gather_uneven(const char* from, char* to,
                                     const std::vector<uint64_t>& sizes,
                                     const std::vector<uint64_t>& offsets) {
  const size_t most = *std::max_element(sizes.begin(), sizes.end());
  emulator_count_sent(sizes[rank()] * (count() - 1));
  const auto part = [&](int r, size_t at) {
    return at < sizes[r] ? std::min<size_t>(kSlotBytes, sizes[r] - at) : 0;
  };
  for (size_t at = 0; at < most; at += kSlotBytes, ++pieces_) {
    if (const auto size = part(rank(), at))
      std::memcpy(segment_->slot(rank(), pieces_), from + at, size);
    if (!segment_->barrier()) return false;
    for (int r = 0; r < count(); ++r) {
      const auto size = part(r, at);
      const char* piece = r == rank() ? from + at : segment_->slot(r, pieces_);
      if (size) std::memmove(to + offsets[r] + at, piece, size);
    }
  }
  return true;
}

// With much to do, each rank reduces its share of a piece into its slot, and all gather the shares.
bool Communicator::all_reduce(const char* from, char* to, size_t elements, uint32_t type,
                              uint32_t op) {
  const size_t width = width_of(type), per_piece = kSlotBytes / width;
  emulator_count_sent(2 * elements * width * (count() - 1) / count());  // around a ring
  std::vector<const char*> inputs(count());
  for (size_t at = 0; at < elements; at += per_piece, ++pieces_) {
    const size_t size = std::min(per_piece, elements - at);
    char* mine = segment_->slot(rank(), pieces_);
    std::memcpy(mine, from + at * width, size * width);
    if (!segment_->barrier()) return false;
    const bool shares = size * width >= kShareWorkFrom;
    const size_t share = shares ? (size + count() - 1) / count() : size;
    const size_t begin = shares ? std::min(size, share * rank()) : 0;
    const size_t length = std::min(share, size - begin);
    for (int r = 0; r < count(); ++r) inputs[r] = segment_->slot(r, pieces_) + begin * width;
    if (!shares) {
      hccl::reduce(to + at * width, inputs, length, type, op);
      continue;
    }
    if (length) hccl::reduce(mine + begin * width, inputs, length, type, op);
    if (!segment_->barrier()) return false;
    for (int r = 0; r < count(); ++r) {
      const size_t first = std::min(size, share * r), number = std::min(share, size - first);
      std::memcpy(to + (at + first) * width, segment_->slot(r, pieces_) + first * width,
                  number * width);
    }
  }
  return true;
}

bool Communicator::reduce(const char* from, char* to, size_t elements, uint32_t type, uint32_t op,
                          int root) {
  const size_t width = width_of(type), per_piece = kSlotBytes / width;
  if (rank() != root) emulator_count_sent(elements * width);
  std::vector<const char*> inputs(count());
  for (size_t at = 0; at < elements; at += per_piece, ++pieces_) {
    const size_t size = std::min(per_piece, elements - at);
    std::memcpy(segment_->slot(rank(), pieces_), from + at * width, size * width);
    if (!segment_->barrier()) return false;
    if (rank() != root) continue;
    for (int r = 0; r < count(); ++r) inputs[r] = segment_->slot(r, pieces_);
    hccl::reduce(to + at * width, inputs, size, type, op);
  }
  return true;
}

bool Communicator::reduce_scatter(const char* from, char* to, size_t elements, uint32_t type,
                                  uint32_t op) {
  const size_t width = width_of(type), per_piece = kSlotBytes / width / count();
  emulator_count_sent(elements * width * (count() - 1));
  std::vector<const char*> inputs(count());
  for (size_t at = 0; at < elements; at += per_piece, ++pieces_) {
    const size_t size = std::min(per_piece, elements - at);
    char* mine = segment_->slot(rank(), pieces_);
    for (int r = 0; r < count(); ++r)
      std::memcpy(mine + r * per_piece * width, from + (r * elements + at) * width, size * width);
    if (!segment_->barrier()) return false;
    for (int r = 0; r < count(); ++r)
      inputs[r] = segment_->slot(r, pieces_) + rank() * per_piece * width;
    hccl::reduce(to + at * width, inputs, size, type, op);
  }
  return true;
}

bool Communicator::broadcast(char* bytes, size_t total, int root) {
  if (rank() == root) emulator_count_sent(total * (count() - 1));
  for (size_t at = 0; at < total; at += kSlotBytes, ++pieces_) {
    const size_t size = std::min(kSlotBytes, total - at);
    char* slot = segment_->slot(root, pieces_);
    if (rank() == root) std::memcpy(slot, bytes + at, size);
    if (!segment_->barrier()) return false;
    if (rank() != root) std::memcpy(bytes + at, slot, size);
  }
  return true;
}

bool Communicator::scatter(const char* from, char* to, size_t bytes, int root) {
  const size_t most = kSlotBytes / count();
  if (rank() == root) emulator_count_sent(bytes * (count() - 1));
  for (size_t at = 0; at < bytes; at += most, ++pieces_) {
    const size_t size = std::min(most, bytes - at);
    char* slot = segment_->slot(root, pieces_);
    for (int r = 0; rank() == root && r < count(); ++r)
      std::memcpy(slot + r * most, from + r * bytes + at, size);
    if (!segment_->barrier()) return false;
    std::memcpy(to + at, slot + rank() * most, size);
  }
  return true;
}

// A send and its receive begin together, as on devices: a send that nobody receives doesn't end.
bool Communicator::begin(Transfer& transfer) {
  const int from = transfer.is_send ? rank() : transfer.peer;
  const int to = transfer.is_send ? transfer.peer : rank();
  auto& box = segment_->box(from, to);
  if (!transfer.call.number) {
    auto& begun = transfer.is_send ? box.sends : box.receives;
    transfer.call.number = begun.load() + 1;
    (transfer.is_send ? box.sender : box.receiver) = transfer.call;
    begun = transfer.call.number;
    segment_->ring(transfer.peer);
  }
  if ((transfer.is_send ? box.receives : box.sends).load() < transfer.call.number) return false;
  const auto &sent = box.sender, &received = box.receiver;
  if (sent.count * width_of(sent.type) != received.count * width_of(received.type) ||
      sent.type != received.type) {
    segment_->fail("HCCL, communicator " + segment_->name() + ": ranks " + std::to_string(from) +
                   " and " + std::to_string(to) + " disagree: rank " + std::to_string(from) +
                   " calls " + describe(sent) + ", rank " + std::to_string(to) + " calls " +
                   describe(received));
    return false;
  }
  transfer.has_begun = true;
  return true;
}

// One step of a transfer, if it can make one. Every transfer has at least one piece.
bool Communicator::step(Transfer& transfer) {
  if (!transfer.has_begun) return begin(transfer);
  const int from = transfer.is_send ? rank() : transfer.peer;
  const int to = transfer.is_send ? transfer.peer : rank();
  auto& box = segment_->box(from, to);
  const uint64_t filled = box.filled.load(), taken = box.taken.load();
  const bool is_last = transfer.done == transfer.size && transfer.done;
  const size_t size = std::min(kBoxBytes, transfer.size - transfer.done);
  if (transfer.is_send) {
    if (is_last || transfer.is_complete) return false;
    if (filled - taken >= kPieces) return false;
    std::memcpy(segment_->box_bytes(from, to, filled), transfer.bytes + transfer.done, size);
    box.filled = filled + 1;
  } else {
    if (filled == taken) return false;
    std::memcpy(transfer.bytes + transfer.done, segment_->box_bytes(from, to, taken), size);
    box.taken = taken + 1;
  }
  transfer.done += size;
  transfer.is_complete = transfer.done == transfer.size;
  segment_->ring(transfer.peer);
  return true;
}

bool Communicator::exchange(std::vector<Transfer>& items) {
  for (const auto& item : items)
    if (item.is_send) emulator_count_sent(item.size);
  // Items with one peer and direction go one after the other.
  const auto is_blocked = [&](size_t index) {
    for (size_t i = 0; i < index; ++i)
      if (!items[i].is_complete && items[i].is_send == items[index].is_send &&
          items[i].peer == items[index].peer)
        return true;
    return false;
  };
  const auto step_all = [&] {
    bool any = false;
    for (size_t i = 0; i < items.size(); ++i)
      while (!items[i].is_complete && !is_blocked(i) && step(items[i])) any = true;
    return any || segment_->has_failed();
  };
  const auto first_open = [&] {
    for (const auto& item : items)
      if (!item.is_complete) return item.peer;
    return -1;
  };
  while (first_open() >= 0)
    if (!segment_->wait(step_all, first_open) || segment_->has_failed()) return false;
  // What was sent has been taken before the stream goes on.
  const auto untaken = [&] {
    for (const auto& item : items) {
      const auto& box = segment_->box(rank(), item.peer);
      if (item.is_send && box.taken.load() < box.filled.load()) return item.peer;
    }
    return -1;
  };
  return segment_->wait([&] { return untaken() < 0; }, untaken);
}

void Communicator::transfers(const char* kernel, std::vector<Transfer> items) {
  std::lock_guard turn(turn_);
  if (items.empty()) return;
  auto& own = segment_->own();
  Call shown = items.front().call;
  std::snprintf(shown.name, sizeof shown.name, "%s", kernel);
  const auto& first = items.front();
  auto& box = first.is_send ? segment_->box(rank(), first.peer) : segment_->box(first.peer, rank());
  shown.number = (first.is_send ? box.sends : box.receives).load() + 1;
  if (report(shown)) return;
  enter(own, shown);
  const bool ok = exchange(items);
  leave(own);
  if (!ok) report(shown);
}

}  // namespace hccl

// For tests, which wait until a rank is where it is to die or to hang.
HCCL_API int emulator_hccl_busy() { return hccl::busy; }
