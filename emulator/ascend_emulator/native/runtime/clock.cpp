#include "clock.h"

#include <algorithm>

#include "pinned.h"

namespace emulator {
namespace {

// Numbers of dead actors are given out again and go on counting, so that clocks stay short.
struct Registry {
  std::mutex mutex;
  std::vector<std::string> labels;
  std::vector<uint64_t> last_counts;
  std::vector<int> free_ids;
};

Registry& registry() {
  static Registry& instance = *new Registry;
  return instance;
}

}  // namespace

void VectorClock::set(int actor, uint64_t count) {
  if (static_cast<size_t>(actor) >= counts_.size()) counts_.resize(actor + 1, 0);
  counts_[actor] = count;
}

void VectorClock::join(const VectorClock& other) {
  if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size(), 0);
  for (size_t i = 0; i < other.counts_.size(); ++i)
    counts_[i] = std::max(counts_[i], other.counts_[i]);
}

Actor::Actor(std::string label) {
  auto& r = registry();
  std::lock_guard lock(r.mutex);
  if (r.free_ids.empty()) {
    id_ = static_cast<int>(r.labels.size());
    r.labels.emplace_back();
    r.last_counts.push_back(0);
  } else {
    id_ = r.free_ids.back();
    r.free_ids.pop_back();
  }
  r.labels[id_] = std::move(label);
  clock_.set(id_, r.last_counts[id_]);
}

Actor::~Actor() {
  auto& r = registry();
  std::lock_guard lock(r.mutex);
  r.last_counts[id_] = clock_.at(id_);
  r.free_ids.push_back(id_);
}

Epoch Actor::tick() {
  const uint64_t count = clock_.at(id_) + 1;
  clock_.set(id_, count);
  return {id_, count};
}

std::string Actor::label_of(int id) {
  auto& r = registry();
  std::lock_guard lock(r.mutex);
  return r.labels[id];
}

Host& Host::instance() {
  static Host& host = *new Host;
  return host;
}

Snapshot Host::snapshot() {
  std::lock_guard lock(mutex_);
  return clock_;
}

Epoch Host::tick() {
  std::lock_guard lock(mutex_);
  const auto epoch = actor_.tick();
  auto next = std::make_shared<VectorClock>(*clock_);  // others may still hold the old one
  next->set(epoch.actor, epoch.count);
  clock_ = std::move(next);
  return epoch;
}

void Host::learns(const VectorClock& other) {
  {
    std::lock_guard lock(mutex_);
    auto next = std::make_shared<VectorClock>(*clock_);
    next->join(other);
    clock_ = std::move(next);
  }
  settle_pending_copies();
}

bool Host::knows(const Epoch& epoch) {
  std::lock_guard lock(mutex_);
  return clock_->covers(epoch);
}

}  // namespace emulator
