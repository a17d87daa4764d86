// Pinned host memory, and the asynchronous copies from and to it that the host can't yet rely on.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"

namespace emulator {

bool is_pinned(const void* address);

// A host-to-device copy whose source the host must leave alone, with the bytes it had.
struct PendingSource {
  const char* begin;
  std::vector<char> bytes;
  std::string stream;
  Epoch done;           // set once the copy ran on its worker
  bool ran = false;
  bool is_fed = false;  // by an earlier copy from the device: its bytes are those at the read
};

// A device-to-host copy: the target holds poison, the bytes wait here until the host may look.
struct PendingTarget {
  char* begin;
  std::vector<char> bytes;
  Epoch done;
  bool ran = false;
};

std::shared_ptr<PendingSource> watch_source(const void* begin, size_t size, std::string stream);
std::shared_ptr<PendingTarget> poison_target(void* begin, size_t size);

void source_was_read(PendingSource& source, const Epoch& epoch);
void target_was_filled(PendingTarget& target, const char* bytes, const Epoch& epoch);

// A task on a stream is about to use this host range, which is ordered after what it depends on.
void deliver_targets_in(const void* begin, size_t size);
void deliver_all_targets();

// The host learned something: checks the sources and delivers the targets that it now knows of.
void settle_pending_copies();

}  // namespace emulator
