// Random numbers of a device: torch_npu's generators keep the seed and the offset, also in graphs.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>

#include "arguments.h"

namespace launcher {

struct RandomState {
  uint64_t seed = 0, offset = 0;
  // In a graph both are device words that every replay sets anew; null otherwise.
  const int64_t* seed_word = nullptr;
  const int64_t* offset_word = nullptr;
};

// Takes a kernel's share of the generator given, or of the device's default one.
RandomState take_random_state(const c10::IValue& generator, c10::DeviceIndex device,
                              Accesses& accesses);

// A CPU generator for one run of the kernel.
at::Generator generator_for(const RandomState& state);

}  // namespace launcher
