// A rank of a communicator: what its collectives do when their turn on a stream has come.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "segment.h"

namespace hccl {

// What HCCL takes of a device for a communicator; given back with it.
struct Resources {
  int device = 0;  // as the process numbers it
  void* buffers = nullptr;
  int streams = 0;

  void give_back();
};

struct Transfer {
  bool is_send;
  int peer;
  char* bytes;  // where the worker finds them
  size_t size;
  Call call;

  // While it runs:
  size_t done = 0;
  bool has_begun = false, is_complete = false;
};

class Communicator {
 public:
  Communicator(Segment* segment, Resources resources);
  ~Communicator();

  Segment& segment() { return *segment_; }
  int count() const { return segment_->count(); }
  int rank() const { return segment_->rank(); }
  // Of the task: "HcclAllReduce of rank 1 of 4 in NAME".
  std::string task_name(const char* kernel) const;

  // On the host, in the order of the calls.
  void note_queued() { segment_->own().queued.fetch_add(1); ++pending_; }
  uint64_t next_capture() { return ++captured_; }
  bool is_destroyed() const { return is_destroyed_; }
  void destroy();

  // On a worker. Each runs one call, and reports its failure as a fault of the device.
  void collective(Call call, const std::function<bool()>& body,
                  const std::vector<uint64_t>* send_counts = nullptr,
                  const std::vector<uint64_t>* receive_counts = nullptr);
  void transfers(const char* kernel, std::vector<Transfer> items);
  void note_finished() { --pending_; }

  // Parts of collectives; false once the communicator has failed.
  bool all_gather(const char* from, char* to, size_t bytes);
  bool all_reduce(const char* from, char* to, size_t count, uint32_t type, uint32_t op);
  bool reduce(const char* from, char* to, size_t count, uint32_t type, uint32_t op, int root);
  bool reduce_scatter(const char* from, char* to, size_t count, uint32_t type, uint32_t op);
  bool broadcast(char* bytes, size_t size, int root);
  bool scatter(const char* from, char* to, size_t bytes, int root);
  bool all_gather_uneven(const char* from, char* to, const std::vector<uint64_t>& sizes,
                         const std::vector<uint64_t>& offsets);
  bool exchange(std::vector<Transfer>& items);

 private:
  bool agree(const Call& call, const std::vector<uint64_t>* send_counts,
             const std::vector<uint64_t>* receive_counts);
  bool counts_agree(const Call& call);
  bool step(Transfer& transfer);
  bool begin(Transfer& transfer);
  bool report(const Call& call);

  std::unique_ptr<Segment> segment_;
  Resources resources_;
  std::mutex turn_;  // one call at a time: two streams without an order are a hazard
  uint64_t number_ = 0, pieces_ = 0;
  std::atomic<uint64_t> captured_{0};
  std::atomic<int> pending_{0};
  std::atomic<bool> is_destroyed_{false};
};

// The communicator of a name in this process, as operators name theirs; none if there is none.
std::shared_ptr<Communicator> find_named(const std::string& name);

// A send or receive of an exchange in which all ranks take part, as `kernel` in messages.
Transfer part_of_exchange(bool is_send, int peer, char* bytes, size_t size, uint32_t type,
                          const char* kernel);

}  // namespace hccl
