// Operator arguments as the host, a shape function and a kernel see them.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>
#include <vector>

#include "../runtime_api.h"

namespace launcher {

using c10::IValue;
using torch::jit::Stack;
using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

bool is_npu(const at::Tensor& tensor);

// A CPU tensor over the bytes of a device tensor. Like a kernel argument it doesn't keep them alive:
// memory that is freed too early is memory that somebody else may be given.
at::Tensor cpu_alias(const at::Tensor& tensor);
at::Tensor meta_of(const at::Tensor& tensor);

// Host tensors are arguments by value: a kernel sees what they held at the call.
at::Tensor kernel_argument(const at::Tensor& tensor);

IValue map_tensors(const IValue& value, const TensorMap& map, c10::Device device);
std::vector<at::Tensor> tensors_in(const IValue& value);

using Accesses = std::vector<emulator_access>;
void add_accesses(const at::Tensor& tensor, bool write, Accesses& out);

}  // namespace launcher
