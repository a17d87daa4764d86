// torch_npu's copy_ does the plain copies between host and device, so its choice of calls, streams
// and syncs is what programs meet. A copy that also converts or rearranges needs device kernels that
// don't exist here: it is split into a plain copy and a launched one.
#include "copies.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "launch.h"

namespace launcher {
namespace {

struct RealCopy {
  std::optional<c10::OperatorHandle> op;
  std::optional<c10::SafeKernelFunction> kernel;
};

RealCopy& real() {
  static auto& instance = *new RealCopy;
  return instance;
}

void plain_copy(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  Stack stack{to, from, non_blocking};
  real().kernel->callBoxed(*real().op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
}

bool is_plain(const at::Tensor& to, const at::Tensor& from) {
  return to.is_contiguous() && from.is_contiguous() && to.sizes() == from.sizes() &&
         to.scalar_type() == from.scalar_type() && to.is_neg() == from.is_neg() &&
         to.is_conj() == from.is_conj();
}

at::Tensor empty_on(c10::Device device, const at::Tensor& like, c10::ScalarType dtype) {
  return at::empty(like.sizes(), at::TensorOptions().dtype(dtype).device(device));
}

void to_device(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const auto source = from.to(to.scalar_type()).expand_as(to).contiguous();
  if (is_plain(to, source)) return plain_copy(to, source, non_blocking);
  auto staged = empty_on(to.device(), to, to.scalar_type());
  plain_copy(staged, source, non_blocking);
  to.copy_(staged);
}

void to_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const auto source = from.expand_as(to).contiguous();
  if (is_plain(to, source)) return plain_copy(to, source, non_blocking);
  auto staged = empty_on(to.device(), to, from.scalar_type());
  plain_copy(staged, source, false);
  to.copy_(staged);
}

void between_devices(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const auto source = from.to(to.scalar_type()).expand_as(to).contiguous();
  if (is_plain(to, source)) return plain_copy(to, source, non_blocking);
  auto staged = empty_on(to.device(), to, to.scalar_type());
  plain_copy(staged, source, non_blocking);
  to.copy_(staged);
}

}  // namespace

void keep_real_copy(const c10::OperatorHandle& op) {
  real().op = op;
  real().kernel = op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
}

void run_copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const bool non_blocking = torch::jit::peek(*stack, 2, 3).toBool();
  const auto from = torch::jit::peek(*stack, 1, 3).toTensor();
  const auto to = torch::jit::peek(*stack, 0, 3).toTensor();
  if (is_npu(to) && is_npu(from) && to.device() == from.device())
    return run_as_kernel(op, keys, stack);
  torch::jit::drop(*stack, 3);
  if (!is_npu(from)) to_device(to, from, non_blocking);
  else if (!is_npu(to)) to_host(to, from, non_blocking);
  else between_devices(to, from, non_blocking);
  stack->push_back(to);
}

void run_contiguous(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  const auto format = torch::jit::peek(*stack, 1, 2).toMemoryFormat();
  const auto tensor = torch::jit::peek(*stack, 0, 2).toTensor();
  torch::jit::drop(*stack, 2);
  stack->push_back(tensor.is_contiguous(format) ? tensor : tensor.clone(format));
}

}  // namespace launcher
