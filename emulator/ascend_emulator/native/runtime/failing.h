// Kernels that are to fail because a test asked for it (`fail_kernel` of ../../api.py).
#pragma once

#include <string>

namespace emulator {

// Whether this run of a kernel fails; to be asked once for each, in the order of its stream.
bool is_to_fail(const std::string& task);

}  // namespace emulator
