// The memory that the ranks of one communicator share, and how they wait for one another.
//
// It is an anonymous file (memfd) of the process that made the root info. The other ranks open it
// through /proc/<process>/fd/<number>, so it has no name, and the kernel frees it with the last
// process that has mapped it, however that ends: nothing is ever left to clean up.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "abi.h"

namespace hccl {

constexpr int kMaxRanks = 16;               // as many as a host has devices
constexpr size_t kSlotBytes = size_t{4} << 20;  // of a collective, per rank and piece
constexpr size_t kBoxBytes = size_t{512} << 10; // of a transfer, per pair of ranks and piece
constexpr int kPieces = 2;                  // one is written while the other is read

// What a rank calls: ranks must agree on it, and messages say it.
struct Call {
  char name[24];
  uint64_t number;    // collectives count per communicator, transfers per pair of ranks
  uint64_t count;
  uint64_t capture;   // 0: not captured; else the collective is the n-th that was captured
  uint32_t type, op;
  uint32_t root;      // or the peer of a transfer
  uint32_t has;       // which of the members below say something
};
enum Has : uint32_t { kHasOp = 1, kHasRoot = 2, kHasPeer = 4, kHasCounts = 8 };

std::string describe(const Call& call);

struct alignas(64) Rank {
  std::atomic<uint32_t> state;  // RankState
  std::atomic<uint32_t> bell, waiting;
  std::atomic<uint64_t> arrivals;  // barriers reached
  std::atomic<uint64_t> queued;    // collectives and transfers that the program has called
  std::atomic<uint32_t> is_busy;   // while `doing` runs; afterwards that was the last one
  int32_t process, device;
  uint64_t process_start;
  Call doing;                      // read by others for messages only, when this rank is stuck
  Call calls[kPieces];             // of the collective with this number modulo 2
  uint64_t send_counts[kPieces][kMaxRanks], receive_counts[kPieces][kMaxRanks];
};
enum RankState : uint32_t { kAbsent = 0, kJoining = 1, kPresent = 2, kDestroyed = 3 };

// From one rank to another.
struct alignas(64) Box {
  std::atomic<uint64_t> sends, receives;  // transfers that the two have begun
  std::atomic<uint64_t> filled, taken;    // pieces
  Call sender, receiver;
};

struct Header {
  char magic[16];
  uint64_t nonce;
  std::atomic<uint32_t> rank_count;
  std::atomic<uint32_t> failure_state;  // 0: none, 1: being written, 2: there
  char failure[1024];
  Rank ranks[kMaxRanks];
  Box boxes[kMaxRanks][kMaxRanks];
};

class Segment {
 public:
  // Makes the memory and the bytes that let other processes find it.
  static Result make_root(char* root);

  // Joins as `rank` of `count`, and waits for the other ranks. On failure `why` says it in one line.
  static Segment* join(const char* root, int count, int rank, int device, const std::string& name,
                       Result* result, std::string* why);
  ~Segment();

  int count() const { return count_; }
  int rank() const { return rank_; }
  const std::string& name() const { return name_; }
  Rank& rank_at(int rank) { return header_->ranks[rank]; }
  Rank& own() { return header_->ranks[rank_]; }
  Box& box(int from, int to) { return header_->boxes[from][to]; }
  char* slot(int rank, uint64_t piece);
  char* box_bytes(int from, int to, uint64_t piece);

  // Waits until `done`, ringing nobody. `blamed` tells which rank is being waited for. False if the
  // communicator has failed: a rank died, destroyed it, or didn't come in time.
  bool wait(const std::function<bool()>& done, const std::function<int()>& blamed);
  bool barrier();
  void ring(int rank);
  void ring_all();

  // The first failure stays; every rank reports the same text.
  void fail(const std::string& message);
  bool has_failed() const;
  std::string failure() const;

  std::string activity_of(int rank);  // what it does or did last, for messages
  void leave();

 private:
  Segment() = default;
  bool check_peers(const std::function<int()>& blamed, int64_t waited_seconds);

  Header* header_ = nullptr;
  char* base_ = nullptr;
  int count_ = 0, rank_ = 0;
  std::string name_;
};

}  // namespace hccl
