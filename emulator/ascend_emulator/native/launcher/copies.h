// copy_ and contiguous for the npu key: torch_npu's own kernels move the bytes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "arguments.h"

namespace launcher {

void keep_real_copy(const c10::OperatorHandle& op);  // before run_copy replaces it
void run_copy(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack);
void run_contiguous(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack);

}  // namespace launcher
