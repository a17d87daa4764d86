// Data types and reductions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "abi.h"

namespace hccl {

size_t width_of(uint32_t type);  // bytes of an element; 0: no such type
std::string name_of_type(uint32_t type);
std::string name_of_reduction(uint32_t op);

// Why HCCL has no such reduction on A2 and A3, according to its reference; empty if it has.
std::string why_no_reduction(uint32_t type, uint32_t op);

// out[i] = inputs[0][i] op inputs[1][i] op ..., in this order, so the result is the same in every
// run. float16 and bfloat16 are computed in float32 and rounded once. HCCL rounds after each
// operand, in an order that its algorithm chooses; with two operands both give the same.
// `out` may be one of the inputs.
void reduce(char* out, const std::vector<const char*>& inputs, size_t count, uint32_t type,
            uint32_t op);

}  // namespace hccl
