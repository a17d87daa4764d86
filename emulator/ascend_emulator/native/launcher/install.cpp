// Replaces the kernels of the npu key; called once, right after torch_npu was imported.
#include <Python.h>

#include <ATen/NativeFunctions.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/split_with_sizes_copy_native.h>

#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "../runtime_api.h"
#include "copies.h"
#include "hidden_copies.h"
#include "launch.h"

namespace launcher {
namespace {

constexpr auto kKey = c10::DispatchKey::PrivateUse1;

// These manage memory or ask about it, and torch_npu's own work as they are.
const std::set<std::string> kKept{
    "aten::_local_scalar_dense", "aten::record_stream",         "aten::is_pinned",
    "aten::_pin_memory",         "aten::is_set_to",             "aten::_copy_from_and_resize",
    "aten::_copy_from",          "aten::_has_compatible_shallow_copy_type"};
const std::vector<std::string> kKeptPrefixes{"aten::empty", "aten::resize", "aten::set_",
                                             "aten::new_empty"};

// Never destroyed: unregistering while the process ends would race with what else ends.
std::vector<c10::RegistrationHandleRAII>& registrations() {
  static auto& instance = *new std::vector<c10::RegistrationHandleRAII>;
  return instance;
}

bool is_kept(const c10::OperatorName& name, const c10::FunctionSchema& schema) {
  if (name.name.rfind("aten::", 0) != 0 || kKept.count(name.name)) return true;
  for (const auto& prefix : kKeptPrefixes)
    if (name.name.rfind(prefix, 0) == 0) return true;
  for (const auto& result : schema.returns())  // views need no kernel
    if (result.alias_info() && !result.alias_info()->isWrite()) return name.name != "aten::contiguous";
  return false;
}

c10::KernelFunction kernel_for(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  if (name == "aten::_to_copy")
    return c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(at::native::_to_copy));
  if (name == "aten::contiguous")
    return c10::KernelFunction::makeFromBoxedFunction<&run_contiguous>();
  // op-plugin copies part by part but for 33 to 64 parts of few long rows, which have a kernel
  // (SplitWithSizesCopyNpuOpApi.cpp); nothing here makes so many.
  if (name == "aten::split_with_sizes_copy" && op.operator_name().overload_name == "out")
    return c10::KernelFunction::makeFromUnboxedFunction(
        TORCH_FN(at::native::split_with_sizes_copy_out));
  if (name != "aten::copy_") return c10::KernelFunction::makeFromBoxedFunction<&run_as_kernel>();
  keep_real_copy(op);
  return c10::KernelFunction::makeFromBoxedFunction<&run_copy>();
}

void replace(const c10::OperatorName& name, c10::KernelFunction kernel) {
  registrations().push_back(c10::Dispatcher::singleton().registerImpl(
      name, kKey, std::move(kernel), std::nullopt, nullptr, "npu-emulator"));
}

// Attention of torch's own interface has no reference: it is computed by its definition, of
// operators that do. torch_npu routes it to a fused kernel in its autograd kernel already.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
                     std::optional<double> scale, bool enable_gqa) {
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, mask, dropout, is_causal, std::nullopt, scale, enable_gqa));
}

void replace_attention() {
  for (const auto key : {kKey, c10::DispatchKey::AutogradPrivateUse1})
    registrations().push_back(c10::Dispatcher::singleton().registerImpl(
        {"aten::scaled_dot_product_attention", ""}, key,
        c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(attention)), std::nullopt, nullptr,
        "npu-emulator"));
}

std::vector<std::string> words_of(const char* list) {
  std::vector<std::string> out;
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) out.push_back(word);
  return out;
}

void* release_python() { return PyGILState_Check() ? PyEval_SaveThread() : nullptr; }
void reacquire_python(void* state) {
  if (state) PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}

}  // namespace
}  // namespace launcher

using namespace launcher;

extern "C" __attribute__((visibility("default"))) int emulator_install() {
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(kKey)) {
    const auto op = dispatcher.findSchema(name);
    if (!op || is_kept(name, op->schema())) continue;
    replace(name, kernel_for(*op));
    ++count;
  }
  replace_attention();
  emulator_set_wait_hooks(release_python, reacquire_python);
  return count;
}

// 0, or -1 if there is no such operator. The lists name arguments, separated by commas.
extern "C" __attribute__((visibility("default"))) int emulator_install_reference(
    const char* name, const char* overload, const char* written, const char* contiguous,
    const char* paged, const char* block_ids) {
  const c10::OperatorName operator_name{name, overload};
  if (!c10::Dispatcher::singleton().findSchema(operator_name)) return -1;
  set_written_arguments(operator_name, words_of(written));
  set_contiguous_arguments(operator_name, words_of(contiguous));
  set_paged_arguments(operator_name, words_of(paged), words_of(block_ids));
  replace(operator_name, c10::KernelFunction::makeFromBoxedFunction<&run_as_reference>());
  return 0;
}
