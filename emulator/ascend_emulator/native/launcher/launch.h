// Runs an operator of the npu dispatch key as a kernel: asynchronously, on the stream's worker.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>

#include "arguments.h"

namespace launcher {

// Boxed kernels for the npu key.
void run_as_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack);
void run_as_reference(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack);

// Arguments that an operator writes although its schema doesn't say so (by operator, overload).
void set_written_arguments(const c10::OperatorName& name, std::vector<std::string> arguments);

// Arguments of which an operator touches blocks alone, if all arguments that say which are given.
void set_paged_arguments(const c10::OperatorName& name, std::vector<std::string> arguments,
                         std::vector<std::string> block_ids);

// The stream that torch_npu would use, once its own queue is drained.
void* current_stream(c10::DeviceIndex device);
void launch(void* stream, const std::string& name, const Accesses& accesses,
            std::function<void()> run);

}  // namespace launcher
