// Finds accesses to device memory that no event, wait or sync orders.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "abi.h"
#include "clock.h"

namespace emulator {

using Access = emulator_access;

// Notes the accesses of one task and reports those that conflict with an unordered earlier one.
// Those by block are left to the task, which notes them while it runs.
void check_accesses(const std::vector<Access>& accesses, const Epoch& epoch,
                    const VectorClock& clock, const std::string& task);

// The range was allocated or freed: its history is forgotten. On free, work that the host does not
// know to be complete is a hazard.
void forget_range(const char* begin, size_t size, bool check_in_use);

}  // namespace emulator
