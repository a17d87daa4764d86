// The history is kept per byte range: a map of disjoint segments, each with its last write and the
// reads since. A task states the exact bytes it may touch (strided views as runs, see
// launcher/arguments.cpp), so two streams may work on two halves of one allocation.
//
// The caching allocator needs no special treatment. It reuses a block on the stream that owned it,
// which orders the accesses, or, after record_stream, once an event query has told the host that
// the other stream is done, and whatever is enqueued after that relies on the host's knowledge.
#include "hazards.h"

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>

#include "memory.h"
#include "report.h"

namespace emulator {
namespace {

struct Touch {
  Epoch epoch;
  int task = 0;  // index into the names
};

struct Segment {
  uintptr_t end = 0;
  Touch write;  // count 0: never written
  std::vector<Touch> reads;
};

using Segments = std::map<uintptr_t, Segment>;

class History {
 public:
  void note(const Access& access, const Epoch& epoch, const VectorClock& clock, int task);
  void forget(uintptr_t begin, uintptr_t end, bool check_in_use);
  int name_id(const std::string& name);

  std::mutex mutex;

 private:
  void split(uintptr_t at);
  void fill_gaps(uintptr_t begin, uintptr_t end);
  void check(const Segment& segment, uintptr_t begin, bool write, const VectorClock& clock,
             int task, const Epoch& epoch);
  void conflict(const char* kind, const Touch& earlier, uintptr_t address, int task,
                const Epoch& epoch);

  Segments segments_;
  std::map<std::string, int> ids_;
  std::vector<std::string> names_;
};

History& history() {
  static History& instance = *new History;
  return instance;
}

int History::name_id(const std::string& name) {
  auto [it, is_new] = ids_.try_emplace(name, static_cast<int>(names_.size()));
  if (is_new) names_.push_back(name);
  return it->second;
}

void History::split(uintptr_t at) {
  auto it = segments_.upper_bound(at);
  if (it == segments_.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  Segment tail = it->second;
  it->second.end = at;
  segments_.emplace(at, std::move(tail));
}

void History::fill_gaps(uintptr_t begin, uintptr_t end) {
  uintptr_t at = begin;
  auto it = segments_.lower_bound(begin);
  while (at < end) {
    if (it == segments_.end() || it->first > at) {
      const uintptr_t stop = it == segments_.end() ? end : std::min(end, it->first);
      Segment gap;
      gap.end = stop;
      it = segments_.emplace(at, gap).first;
    }
    at = it->second.end;
    ++it;
  }
}

void History::conflict(const char* kind, const Touch& earlier, uintptr_t address, int task,
                       const Epoch& epoch) {
  hazard(std::string(kind) + " without an ordering edge: " + names_[task] + " on " +
         Actor::label_of(epoch.actor) + " after " + names_[earlier.task] + " on " +
         Actor::label_of(earlier.epoch.actor) + ", " +
         describe_address(reinterpret_cast<const void*>(address)) +
         " (missing wait_stream, event wait or record_stream)");
}

void History::check(const Segment& segment, uintptr_t begin, bool write, const VectorClock& clock,
                    int task, const Epoch& epoch) {
  if (segment.write.epoch.count && !clock.covers(segment.write.epoch)) {
    conflict(write ? "write after write" : "read after write", segment.write, begin, task, epoch);
    return;
  }
  if (!write) return;
  for (const auto& read : segment.reads) {
    if (!clock.covers(read.epoch)) {
      conflict("write after read", read, begin, task, epoch);
      return;
    }
  }
}

void History::note(const Access& access, const Epoch& epoch, const VectorClock& clock, int task) {
  const auto begin = reinterpret_cast<uintptr_t>(access.begin);
  const uintptr_t end = begin + access.size;
  split(begin);
  split(end);
  if (!access.write) fill_gaps(begin, end);
  auto it = segments_.lower_bound(begin);
  bool reported = false;
  while (it != segments_.end() && it->first < end) {
    const auto before = counters().hazards.load();
    if (!reported) check(it->second, it->first, access.write, clock, task, epoch);
    reported = reported || counters().hazards.load() != before;
    if (access.write) {
      it = segments_.erase(it);
      continue;
    }
    auto& reads = it->second.reads;
    std::erase_if(reads, [&](const Touch& t) { return clock.covers(t.epoch); });
    reads.push_back({epoch, task});
    ++it;
  }
  if (!access.write) return;
  Segment written;
  written.end = end;
  written.write = {epoch, task};
  segments_.emplace(begin, std::move(written));
}

void History::forget(uintptr_t begin, uintptr_t end, bool check_in_use) {
  split(begin);
  split(end);
  auto it = segments_.lower_bound(begin);
  const auto known = Host::instance().snapshot();
  bool in_use = false;
  while (it != segments_.end() && it->first < end) {
    in_use = in_use || !known->covers(it->second.write.epoch);
    for (const auto& read : it->second.reads) in_use = in_use || !known->covers(read.epoch);
    it = segments_.erase(it);
  }
  if (check_in_use && in_use)
    hazard("device memory freed while a stream may still use it: " +
           describe_address(reinterpret_cast<const void*>(begin)));
}

}  // namespace

void check_accesses(const std::vector<Access>& accesses, const Epoch& epoch,
                    const VectorClock& clock, const std::string& task) {
  if (accesses.empty()) return;
  auto& h = history();
  std::lock_guard lock(h.mutex);
  const int id = h.name_id(task);
  // Reads first: a task that updates in place must not conflict with itself.
  for (const auto& access : accesses)
    if (!access.write && !access.by_block && access.size) h.note(access, epoch, clock, id);
  for (const auto& access : accesses)
    if (access.write && !access.by_block && access.size) h.note(access, epoch, clock, id);
}

void forget_range(const char* begin, size_t size, bool check_in_use) {
  auto& h = history();
  std::lock_guard lock(h.mutex);
  const auto at = reinterpret_cast<uintptr_t>(begin);
  h.forget(at, at + size, check_in_use);
}

}  // namespace emulator
