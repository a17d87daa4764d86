// Copies that a device's operators make of strided tensors before and after their own kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

#include "arguments.h"

namespace launcher {

// The arguments that an operator with a reference copies if they are strided; without this, all
// that it doesn't write.
void set_contiguous_arguments(const c10::OperatorName& name, std::vector<std::string> arguments);

void count_hidden_copies(const c10::OperatorHandle& op, const std::vector<IValue>& arguments,
                         const std::vector<bool>& is_written);

}  // namespace launcher
