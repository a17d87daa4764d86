#include "arguments.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>

namespace launcher {
namespace {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

// A strided view is described to the hazard check as runs of bytes, up to this many; beyond, as one
// range from its first to its last byte.
constexpr int64_t kMaxRuns = 512;

struct Dimension {
  int64_t size, stride;  // bytes
};

std::vector<Dimension> dimensions_of(const at::Tensor& tensor) {
  const auto item = static_cast<int64_t>(tensor.element_size());
  std::vector<Dimension> out;
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) > 1 && tensor.stride(d) > 0)
      out.push_back({tensor.size(d), tensor.stride(d) * item});
  std::sort(out.begin(), out.end(), [](auto& a, auto& b) { return a.stride < b.stride; });
  return out;
}

// Merges the dimensions that continue the run so far, and leaves the others.
int64_t take_run(std::vector<Dimension>& dimensions, int64_t item) {
  int64_t run = item;
  auto it = dimensions.begin();
  while (it != dimensions.end() && it->stride <= run) {
    run = std::max(run, it->stride * (it->size - 1) + run);
    ++it;
  }
  dimensions.erase(dimensions.begin(), it);
  return run;
}

void add_runs(const char* begin, int64_t run, const std::vector<Dimension>& dimensions,
              size_t depth, bool write, Accesses& out) {
  if (depth == 0) {
    out.push_back({begin, static_cast<size_t>(run), write});
    return;
  }
  const auto& d = dimensions[depth - 1];
  for (int64_t i = 0; i < d.size; ++i)
    add_runs(begin + i * d.stride, run, dimensions, depth - 1, write, out);
}

template <class T, class Item>
c10::List<T> mapped_list(const std::vector<Item>& items, const TensorMap& map) {
  c10::List<T> out;
  for (const std::optional<at::Tensor> item : items) {
    if constexpr (std::is_same_v<T, at::Tensor>)
      out.push_back(item->defined() ? map(*item) : *item);
    else
      out.push_back(item && item->defined() ? T(map(*item)) : item);
  }
  return out;
}

}  // namespace

bool is_npu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kNpu;
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  const auto& from = tensor.storage();
  void* bytes = emulator_alias(const_cast<void*>(from.data()));
  c10::Storage storage(c10::Storage::use_byte_size_t(), from.nbytes(),
                       at::DataPtr(bytes, c10::kCPU), nullptr, false);
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return out;
}

at::Tensor meta_of(const at::Tensor& tensor) {
  if (!is_npu(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           at::TensorOptions().dtype(tensor.dtype()).device(c10::kMeta));
}

at::Tensor kernel_argument(const at::Tensor& tensor) {
  return is_npu(tensor) ? cpu_alias(tensor) : tensor.clone();
}

IValue map_tensors(const IValue& value, const TensorMap& map, c10::Device device) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(map(value.toTensor())) : value;
  if (value.isTensorList()) return mapped_list<at::Tensor>(value.toTensorVector(), map);
  if (value.isOptionalTensorList())
    return mapped_list<std::optional<at::Tensor>>(value.toOptionalTensorVector(), map);
  if (value.isDevice()) return value.toDevice().type() == kNpu ? IValue(device) : value;
  if (value.isGenerator()) return IValue();
  return value;
}

std::vector<at::Tensor> tensors_in(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<at::Tensor> out;
  if (value.isOptionalTensorList())
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor) out.push_back(*tensor);
  return out;
}

void add_accesses(const at::Tensor& tensor, bool write, Accesses& out) {
  if (!is_npu(tensor) || tensor.numel() == 0) return;
  const auto item = static_cast<int64_t>(tensor.element_size());
  const auto* begin = static_cast<const char*>(tensor.storage().data()) +
                      tensor.storage_offset() * item;
  auto dimensions = dimensions_of(tensor);
  int64_t run = take_run(dimensions, item), runs = 1;
  for (const auto& d : dimensions) runs *= d.size;
  if (runs > kMaxRuns) {
    for (const auto& d : dimensions) run += (d.size - 1) * d.stride;
    dimensions.clear();
  }
  add_runs(begin, run, dimensions, dimensions.size(), write, out);
}

}  // namespace launcher
