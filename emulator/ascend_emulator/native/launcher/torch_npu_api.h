// What the launcher uses of torch_npu, whose headers for these four functions include CANN's: their
// declarations are enough.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/TensorBody.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace c10_npu {
class NPUStream {
 public:
  ~NPUStream() {}               // not trivial, as torch_npu's own: it decides how it is returned
  void* stream() const;         // waits until torch_npu's own task queue has been issued

 private:
  explicit NPUStream(c10::Stream stream) : stream_(stream) {}
  c10::Stream stream_;
};
NPUStream getCurrentNPUStream(c10::DeviceIndex device);
}  // namespace c10_npu

namespace at_npu {
struct PhiloxNpuState {
  union Payload {
    uint64_t val;
    at::Tensor* ptr;
  };
  Payload seed_{};
  Payload offset_{};
  uint64_t offset_intragraph_{0};
  bool captured_ = false;
  bool secondary_stream_capture_state_ = false;
};
class NPUGeneratorImpl {
 public:
  PhiloxNpuState philox_npu_state(uint64_t increment);
};
namespace detail {
const at::Generator& getDefaultNPUGenerator(c10::DeviceIndex device);
}
}  // namespace at_npu
