// Vector clocks: who is known to have finished what.
//
// Every stream, every forked branch of a graph, and the host is an actor. An actor counts its own
// tasks; events, waits and synchronisation carry counts from one actor to another. An access is
// ordered before another when the second actor's clock covers it. That says whether the program
// orders two accesses, not whether they happened to run in order, so delays don't matter.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace emulator {

struct Epoch {
  int actor = 0;
  uint64_t count = 0;
};

class VectorClock {
 public:
  uint64_t at(int actor) const {
    return static_cast<size_t>(actor) < counts_.size() ? counts_[actor] : 0;
  }
  void set(int actor, uint64_t count);
  void join(const VectorClock& other);
  bool covers(const Epoch& epoch) const { return at(epoch.actor) >= epoch.count; }

 private:
  std::vector<uint64_t> counts_;
};

class Actor {
 public:
  explicit Actor(std::string label);
  ~Actor();
  Actor(const Actor&) = delete;
  Actor& operator=(const Actor&) = delete;

  Epoch tick();  // the next task begins
  const VectorClock& clock() const { return clock_; }
  void join(const VectorClock& other) { clock_.join(other); }
  int id() const { return id_; }

  static std::string label_of(int id);

 private:
  int id_;
  VectorClock clock_;
};

using Snapshot = std::shared_ptr<const VectorClock>;

// The host is one actor, whatever its threads: what one thread waited for, all know. This misses
// races between host threads, and never invents one.
class Host {
 public:
  static Host& instance();
  Snapshot snapshot();             // what a task enqueued now may rely on
  Epoch tick();                    // the host itself touches device memory (a synchronous copy)
  void learns(const VectorClock&); // a sync or a query told the host that this much is complete
  bool knows(const Epoch& epoch);

 private:
  std::mutex mutex_;
  std::shared_ptr<VectorClock> clock_ = std::make_shared<VectorClock>();
  Actor actor_{"the host"};
};

}  // namespace emulator
