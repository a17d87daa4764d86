#include "random.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "torch_npu_api.h"

namespace launcher {
namespace {

constexpr uint64_t kShare = 4;  // philox offsets advance in steps of four

// splitmix64's finaliser: near seeds and offsets give unrelated streams, and none is the CPU's.
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

RandomState take_random_state(const c10::IValue& value, c10::DeviceIndex device,
                              Accesses& accesses) {
  auto generator = value.isGenerator() ? value.toGenerator()
                                       : at_npu::detail::getDefaultNPUGenerator(device);
  TORCH_CHECK(generator.device().type() == c10::DeviceType::PrivateUse1,
              "Expected a generator of the npu device, got one of ", generator.device());
  std::lock_guard lock(generator.mutex());
  auto* implementation = reinterpret_cast<at_npu::NPUGeneratorImpl*>(
      generator.unsafeGetGeneratorImpl());
  const auto philox = implementation->philox_npu_state(kShare);
  RandomState out;
  if (!philox.captured_) {
    out.seed = philox.seed_.val;
    out.offset = philox.offset_.val;
    return out;
  }
  out.seed_word = cpu_alias(*philox.seed_.ptr).data_ptr<int64_t>();
  out.offset_word = cpu_alias(*philox.offset_.ptr).data_ptr<int64_t>();
  out.offset = philox.offset_intragraph_;
  add_accesses(*philox.seed_.ptr, false, accesses);
  add_accesses(*philox.offset_.ptr, false, accesses);
  return out;
}

at::Generator generator_for(const RandomState& state) {
  const uint64_t seed = state.seed_word ? static_cast<uint64_t>(*state.seed_word) : state.seed;
  const uint64_t base = state.offset_word ? static_cast<uint64_t>(*state.offset_word) : 0;
  return at::detail::createCPUGenerator(mixed(mixed(seed) ^ (base + state.offset)));
}

}  // namespace launcher
