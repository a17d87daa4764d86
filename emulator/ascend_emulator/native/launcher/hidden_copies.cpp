// The published aclnn functions (CANN's ops-math, ops-nn, ops-transformer, 9.1) take strided tensors
// by a copy: l0op::Contiguous launches a kernel for each input that isn't contiguous, and
// l0op::ViewCopy one for a strided output. The functions that are made from an operator's definition
// do so for inputs with AutoContiguous, which nearly all have. add and mul read strides themselves on
// the 950 generation only. What follows are the exceptions.
#include "hidden_copies.h"

#include <map>
#include <set>
#include <tuple>

namespace launcher {
namespace {

// Copies are what these launch, or they fill what they are given; fills only write.
const std::set<std::string> kTakeStrides{"aten::copy_", "aten::clone", "aten::contiguous",
                                         "aten::_to_copy", "aten::view_copy", "aten::empty_like"};
const std::set<std::string> kFill{"aten::fill_",       "aten::zero_",   "aten::normal_",
                                  "aten::uniform_",    "aten::random_", "aten::bernoulli_",
                                  "aten::exponential_"};

// Their matrices may have the last two dimensions exchanged (IsTransposeLastTwoDims).
const std::set<std::string> kMatmul{"aten::mm",    "aten::bmm",    "aten::addmm", "aten::matmul",
                                    "aten::baddbmm", "aten::linear", "aten::addbmm"};

struct ByName {
  bool operator()(const c10::OperatorName& a, const c10::OperatorName& b) const {
    return std::tie(a.name, a.overload_name) < std::tie(b.name, b.overload_name);
  }
};

std::map<c10::OperatorName, std::set<std::string>, ByName>& contiguous_arguments() {
  static auto& instance = *new std::map<c10::OperatorName, std::set<std::string>, ByName>;
  return instance;
}

bool is_strided(const at::Tensor& tensor) {
  return is_npu(tensor) && tensor.numel() > 0 && !tensor.is_contiguous();
}

bool is_transposed_matrix(const at::Tensor& tensor) {
  return tensor.dim() >= 2 && tensor.transpose(-1, -2).is_contiguous();
}

// An argument that only takes a result: its old values aren't read.
bool is_target(const c10::Argument& argument, const std::string& op) {
  return argument.name() == "out" || argument.is_out() || kFill.count(op);
}

void count(const char* what, const std::string& argument, const std::string& op) {
  emulator_count_hidden_copy(("hidden copy " + (what + argument) + " for " + op).c_str());
}

}  // namespace

void set_contiguous_arguments(const c10::OperatorName& name, std::vector<std::string> arguments) {
  contiguous_arguments()[name] = {arguments.begin(), arguments.end()};
}

void count_hidden_copies(const c10::OperatorHandle& op, const std::vector<IValue>& arguments,
                         const std::vector<bool>& is_written) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  if (kTakeStrides.count(name)) return;
  const auto given = contiguous_arguments().find(op.operator_name());
  const bool is_reference = given != contiguous_arguments().end();
  const bool is_matmul = kMatmul.count(name) != 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (is_reference && !given->second.count(argument.name())) continue;
    for (const auto& tensor : tensors_in(arguments[i])) {
      if (!is_strided(tensor) || (is_matmul && is_transposed_matrix(tensor))) continue;
      if (!is_written[i] || !is_target(argument, name)) count("of ", argument.name(), name);
      if (is_written[i] && !is_reference) count("to ", argument.name(), name);
    }
  }
}

}  // namespace launcher
