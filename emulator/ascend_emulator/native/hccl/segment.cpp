#include "segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

#include "../runtime_api.h"
#include "elements.h"

namespace hccl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kMagic[16] = "npu-emulator/1";
constexpr size_t kHeaderBytes = (sizeof(Header) + 4095) / 4096 * 4096;
constexpr size_t kSlots = size_t{kMaxRanks} * kPieces * kSlotBytes;
constexpr size_t kBoxes = size_t{kMaxRanks} * kMaxRanks * kPieces * kBoxBytes;
constexpr size_t kTotal = kHeaderBytes + kSlots + kBoxes;  // pages exist once they are written

constexpr int kSpins = 2000;
constexpr long kLookNanoseconds = 50'000'000;  // how often a waiting rank looks after the others

// What the root info holds: how another process finds the memory, and how it knows that it can.
struct Root {
  char magic[16];
  uint64_t nonce;
  int32_t process, file;
  uint64_t process_start;
  char boot[40], processes[40], host[64];
};
static_assert(sizeof(Root) <= kRootInfoBytes);

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Host and process namespace: /proc shows a process of the same two only.
void describe_place(Root& root) {
  std::snprintf(root.boot, sizeof root.boot, "%s",
                first_line("/proc/sys/kernel/random/boot_id").c_str());
  const auto length = readlink("/proc/self/ns/pid", root.processes, sizeof root.processes - 1);
  root.processes[length > 0 ? length : 0] = '\0';
  gethostname(root.host, sizeof root.host - 1);
}

// When a process started, in ticks since boot; 0 if it has ended. Process ids are used again.
uint64_t start_of(int process) {
  // Its first thread's file: qemu shows a process a made-up /proc/<process>/stat of its own.
  const auto id = std::to_string(process);
  const auto line = first_line("/proc/" + id + "/task/" + id + "/stat");
  const auto name_end = line.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream rest(line.substr(name_end + 2));
  std::string field;
  rest >> field;
  if (field == "Z" || field == "X") return 0;
  for (int i = 4; i <= 21; ++i) rest >> field;  // fields are counted from 1, the state is the 3rd
  uint64_t start = 0;
  rest >> start;
  return start;
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr,
                 0);
}

// Files of roots that this process has made: closed once every rank has mapped the memory.
struct Roots {
  std::mutex mutex;
  std::map<uint64_t, int> files;  // by nonce
};

Roots& roots() {
  static Roots& instance = *new Roots;
  return instance;
}

void close_root(uint64_t nonce) {
  std::lock_guard lock(roots().mutex);
  auto it = roots().files.find(nonce);
  if (it == roots().files.end()) return;
  close(it->second);
  roots().files.erase(it);
}

uint64_t new_nonce() {
  uint64_t nonce = 0;
  if (getentropy(&nonce, sizeof nonce)) nonce = Clock::now().time_since_epoch().count();
  return nonce;
}

int64_t seconds_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - start).count();
}

std::string process_text(const Rank& rank) {
  return "process " + std::to_string(rank.process) + " on npu:" + std::to_string(rank.device);
}

}  // namespace

std::string describe(const Call& call) {
  std::string text = std::string(call.name) + " #" + std::to_string(call.number) + " (";
  if (call.has & kHasCounts)
    text += name_of_type(call.type) + ", counts for each rank";
  else
    text += std::to_string(call.count) + " of " + name_of_type(call.type);
  if (call.has & kHasOp) text += ", " + name_of_reduction(call.op);
  if (call.has & kHasRoot) text += ", root " + std::to_string(call.root);
  if (call.has & kHasPeer) text += ", with rank " + std::to_string(call.root);
  if (call.capture) text += ", captured as #" + std::to_string(call.capture);
  return text + ")";
}

Result Segment::make_root(char* out) {
  Root root{};
  std::memcpy(root.magic, kMagic, sizeof kMagic);
  root.nonce = new_nonce();
  root.process = getpid();
  root.process_start = start_of(getpid());
  describe_place(root);
  root.file = static_cast<int>(syscall(SYS_memfd_create, "npu-emulator-hccl", 1u /* cloexec */));
  if (root.file < 0 || ftruncate(root.file, static_cast<off_t>(kTotal))) return kSystemCall;
  void* memory = mmap(nullptr, kHeaderBytes, PROT_READ | PROT_WRITE, MAP_SHARED, root.file, 0);
  if (memory == MAP_FAILED) return kMemory;
  auto* header = static_cast<Header*>(memory);
  std::memcpy(header->magic, kMagic, sizeof kMagic);
  header->nonce = root.nonce;
  munmap(memory, kHeaderBytes);
  std::memset(out, 0, kRootInfoBytes);
  std::memcpy(out, &root, sizeof root);
  std::lock_guard lock(roots().mutex);
  roots().files[root.nonce] = root.file;
  return kSuccess;
}

Segment* Segment::join(const char* bytes, int count, int rank, int device, const std::string& name,
                       Result* result, std::string* why) {
  Root root, here{};
  std::memcpy(&root, bytes, sizeof root);
  describe_place(here);
  const auto refuse = [&](Result status, const std::string& reason) {
    *result = status;
    *why = "HCCL: rank " + std::to_string(rank) + " can't join: " + reason;
    return nullptr;
  };
  if (std::memcmp(root.magic, kMagic, sizeof kMagic))
    return refuse(kParameter, "its root info was not made by HcclGetRootInfo");
  if (count < 1 || rank < 0 || rank >= count)
    return refuse(kParameter, "there is no such rank among " + std::to_string(count));
  if (count > kMaxRanks)
    return refuse(kNotSupported, std::to_string(count) + " ranks are more than the emulated " +
                                     std::to_string(kMaxRanks) + " of a host");
  if (std::strcmp(root.boot, here.boot) || std::strcmp(root.processes, here.processes))
    return refuse(kNotSupported, "rank 0 is on another host or in another container (" +
                                     std::string(root.host) + ", this is " + here.host +
                                     "); emulated devices communicate within one host only");
  const auto path = "/proc/" + std::to_string(root.process) + "/fd/" + std::to_string(root.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0)
    return refuse(kRemote, "the process that made the root info, " +
                               std::to_string(root.process) + ", has ended, or belongs to another "
                               "user: " + std::strerror(errno));
  void* memory = mmap(nullptr, kTotal, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (memory == MAP_FAILED) return refuse(kMemory, "the host can't map the memory that ranks share");
  auto* header = static_cast<Header*>(memory);
  if (std::memcmp(header->magic, kMagic, sizeof kMagic) || header->nonce != root.nonce) {
    munmap(memory, kTotal);
    return refuse(kRemote, "the process that made the root info has ended");
  }
  auto* segment = new Segment;
  segment->header_ = header;
  segment->base_ = static_cast<char*>(memory);
  segment->count_ = count;
  segment->rank_ = rank;
  char unique[32];
  std::snprintf(unique, sizeof unique, "%d-%08x", root.process, static_cast<uint32_t>(root.nonce));
  segment->name_ = name.empty() ? unique : name;

  const auto give_up = [&](Result status, const std::string& reason) {
    segment->fail("HCCL: communicator " + segment->name_ + " was not made: " + reason);
    const auto text = segment->failure();
    delete segment;
    *result = status;
    *why = text;
    return nullptr;
  };
  uint32_t agreed = 0;
  if (!header->rank_count.compare_exchange_strong(agreed, count) &&
      agreed != static_cast<uint32_t>(count))
    return give_up(kParameter, "rank " + std::to_string(rank) + " joins a group of " +
                                   std::to_string(count) + ", another rank one of " +
                                   std::to_string(agreed));
  uint32_t absent = kAbsent;
  if (!segment->own().state.compare_exchange_strong(absent, kJoining))
    return give_up(kParameter, "two processes are rank " + std::to_string(rank) + ", " +
                                   std::to_string(getpid()) + " and " +
                                   std::to_string(segment->own().process));
  segment->own().process = getpid();
  segment->own().process_start = start_of(getpid());
  segment->own().device = device;
  segment->own().state = kPresent;
  segment->ring_all();

  const auto first_absent = [&] {
    for (int r = 0; r < count; ++r)
      if (segment->rank_at(r).state < kPresent) return r;
    return -1;
  };
  const bool complete = segment->wait([&] { return first_absent() < 0; }, first_absent);
  if (rank == 0 || root.process == getpid()) close_root(root.nonce);
  if (!complete) return give_up(kTimeout, "");  // the first failure stays
  for (int r = 0; r < count; ++r)
    for (int other = r + 1; other < count; ++other)
      if (segment->rank_at(r).device == segment->rank_at(other).device)
        return give_up(kParameter, "ranks " + std::to_string(r) + " and " + std::to_string(other) +
                                       " are both on npu:" +
                                       std::to_string(segment->rank_at(r).device) +
                                       "; each needs a device of its own (torch.npu.set_device)");
  *result = kSuccess;
  return segment;
}

Segment::~Segment() { munmap(base_, kTotal); }

char* Segment::slot(int rank, uint64_t piece) {
  return base_ + kHeaderBytes + (size_t{kPieces} * rank + piece % kPieces) * kSlotBytes;
}

char* Segment::box_bytes(int from, int to, uint64_t piece) {
  const size_t pair = size_t{kMaxRanks} * from + to;
  return base_ + kHeaderBytes + kSlots + (kPieces * pair + piece % kPieces) * kBoxBytes;
}

void Segment::ring(int rank) {
  auto& other = rank_at(rank);
  other.bell.fetch_add(1);
  if (other.waiting.load()) futex(&other.bell, FUTEX_WAKE, INT_MAX, nullptr);
}

void Segment::ring_all() {
  for (int r = 0; r < count_; ++r) ring(r);
}

bool Segment::has_failed() const { return header_->failure_state.load() != 0; }

std::string Segment::failure() const {
  while (header_->failure_state.load() == 1) usleep(100);
  return header_->failure;
}

void Segment::fail(const std::string& message) {
  uint32_t none = 0;
  if (!header_->failure_state.compare_exchange_strong(none, 1)) return;
  std::snprintf(header_->failure, sizeof header_->failure, "%s", message.c_str());
  header_->failure_state = 2;
  ring_all();
}

std::string Segment::activity_of(int number) {
  const auto& rank = rank_at(number);
  if (rank.state.load() < kPresent) return "has not joined";
  const uint64_t queued = rank.queued.load();
  if (rank.is_busy.load()) return "is in " + describe(rank.doing);
  const std::string called =
      " (" + std::to_string(queued) + (queued == 1 ? " call" : " calls") + " so far)";
  if (!rank.doing.name[0]) return "is in no collective and has ended none" + called;
  return "is in no collective; its last was " + describe(rank.doing) + called;
}

// False, with a failure, if the rank that is waited for has died or left, or takes too long.
bool Segment::check_peers(const std::function<int()>& blamed, int64_t waited) {
  const int number = blamed();
  if (number < 0) return true;
  const auto& rank = rank_at(number);
  const std::string group = "HCCL, communicator " + name_ + ": rank " + std::to_string(number);
  const std::string us = "rank " + std::to_string(rank_) + " " + activity_of(rank_);
  const auto state = rank.state.load();
  if (state >= kPresent && start_of(rank.process) != rank.process_start) {
    fail(group + " (" + process_text(rank) + ") died while it was waited for; it " +
         activity_of(number) + "; " + us);
    return false;
  }
  if (state == kDestroyed) {
    fail(group + " destroyed the communicator while it was waited for; it " + activity_of(number) +
         "; " + us);
    return false;
  }
  if (waited < emulator_hang_seconds()) return true;
  fail(group + (state < kPresent ? "" : " (" + process_text(rank) + ")") +
       " did not come in " + std::to_string(waited) + " s; it " + activity_of(number) + "; " + us);
  return false;
}

bool Segment::wait(const std::function<bool()>& done, const std::function<int()>& blamed) {
  for (int i = 0; i < kSpins; ++i) {
    if (done()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  const auto start = Clock::now();
  auto looked = start;
  auto& me = own();
  bool ok = true;
  me.waiting.fetch_add(1);
  for (;;) {
    const uint32_t bell = me.bell.load();
    if (done()) break;
    if (has_failed()) {
      ok = false;
      break;
    }
    const timespec timeout{0, kLookNanoseconds};
    futex(&me.bell, FUTEX_WAIT, bell, &timeout);
    if (Clock::now() - looked < std::chrono::nanoseconds(kLookNanoseconds)) continue;
    looked = Clock::now();
    if (done()) break;
    if (!check_peers(blamed, seconds_since(start))) {
      ok = false;
      break;
    }
  }
  me.waiting.fetch_sub(1);
  return ok;
}

bool Segment::barrier() {
  const uint64_t target = own().arrivals.fetch_add(1) + 1;
  for (int r = 0; r < count_; ++r)
    if (r != rank_) ring(r);
  const auto late = [&] {
    for (int r = 0; r < count_; ++r)
      if (rank_at(r).arrivals.load(std::memory_order_acquire) < target) return r;
    return -1;
  };
  return wait([&] { return late() < 0; }, late);
}

void Segment::leave() {
  own().state = kDestroyed;
  ring_all();
}

}  // namespace hccl
