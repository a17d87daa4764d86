#include "elements.h"

#include <algorithm>
#include <cstring>

// Conversions of float16 take most of the time of its reductions without the instructions for it.
#if defined(__x86_64__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=haswell", "default"), optimize("O3")))
#else
#define FOR_EACH_CPU __attribute__((optimize("O3")))
#endif

namespace hccl {
namespace {

// On aarch64, g++ has _Float16 from 13 on; __fp16 is the same format, for storage, in all of them.
#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

constexpr size_t kBlock = 512;  // elements that are reduced at a time

struct TypeInfo {
  uint32_t type;
  size_t width;
  const char* name;
};
constexpr TypeInfo kTypes[] = {
    {kInt8, 1, "int8"},       {kInt16, 2, "int16"},     {kInt32, 4, "int32"},
    {kFloat16, 2, "float16"}, {kFloat32, 4, "float32"}, {kInt64, 8, "int64"},
    {kUint64, 8, "uint64"},   {kUint8, 1, "uint8"},     {kUint16, 2, "uint16"},
    {kUint32, 4, "uint32"},   {kFloat64, 8, "float64"}, {kBfloat16, 2, "bfloat16"},
    {kFloat8E4M3, 1, "float8_e4m3"}, {kFloat8E5M2, 1, "float8_e5m2"}};
constexpr const char* kReductions[] = {"sum", "prod", "max", "min"};

const TypeInfo* info_of(uint32_t type) {
  for (const auto& info : kTypes)
    if (info.type == type) return &info;
  return nullptr;
}

FOR_EACH_CPU void widen_half(const char* from, float* to, size_t count) {
  const auto* in = reinterpret_cast<const Half*>(from);
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<float>(in[i]);
}

FOR_EACH_CPU void narrow_half(const float* from, char* to, size_t count) {
  auto* out = reinterpret_cast<Half*>(to);
  for (size_t i = 0; i < count; ++i) out[i] = static_cast<Half>(from[i]);
}

FOR_EACH_CPU void widen_brain(const char* from, float* to, size_t count) {
  const auto* in = reinterpret_cast<const uint16_t*>(from);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(in[i]) << 16;
    std::memcpy(&to[i], &bits, sizeof bits);
  }
}

// Rounds to nearest even; a NaN stays one.
FOR_EACH_CPU void narrow_brain(const float* from, char* to, size_t count) {
  auto* out = reinterpret_cast<uint16_t*>(to);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &from[i], sizeof bits);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out[i] = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded);
  }
}

template <class T>
T larger(T a, T b) {
  return a != a ? a : b != b ? b : std::max(a, b);  // a NaN wins, as in torch
}

template <class T>
T smaller(T a, T b) {
  return a != a ? a : b != b ? b : std::min(a, b);
}

template <class T>
__attribute__((optimize("O3"))) void combine(T* into, const T* with, size_t count, uint32_t op) {
  switch (op) {
    case kSum:
      for (size_t i = 0; i < count; ++i) into[i] = static_cast<T>(into[i] + with[i]);
      break;
    case kProduct:
      for (size_t i = 0; i < count; ++i) into[i] = static_cast<T>(into[i] * with[i]);
      break;
    case kMaximum:
      for (size_t i = 0; i < count; ++i) into[i] = larger(into[i], with[i]);
      break;
    default:
      for (size_t i = 0; i < count; ++i) into[i] = smaller(into[i], with[i]);
  }
}

template <class T>
void reduce_as(char* out, const std::vector<const char*>& inputs, size_t count, uint32_t op) {
  T block[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t size = std::min(kBlock, count - at);
    std::memcpy(block, inputs[0] + at * sizeof(T), size * sizeof(T));
    for (size_t r = 1; r < inputs.size(); ++r)
      combine(block, reinterpret_cast<const T*>(inputs[r]) + at, size, op);
    std::memcpy(out + at * sizeof(T), block, size * sizeof(T));
  }
}

using Widen = void (*)(const char*, float*, size_t);
using Narrow = void (*)(const float*, char*, size_t);

void reduce_halves(char* out, const std::vector<const char*>& inputs, size_t count, uint32_t op,
                   Widen widen, Narrow narrow) {
  float sum[kBlock], next[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t size = std::min(kBlock, count - at);
    widen(inputs[0] + 2 * at, sum, size);
    for (size_t r = 1; r < inputs.size(); ++r) {
      widen(inputs[r] + 2 * at, next, size);
      combine(sum, next, size, op);
    }
    narrow(sum, out + 2 * at, size);
  }
}

}  // namespace

size_t width_of(uint32_t type) {
  const auto* info = info_of(type);
  return info ? info->width : 0;
}

std::string name_of_type(uint32_t type) {
  const auto* info = info_of(type);
  return info ? info->name : "data type " + std::to_string(type);
}

std::string name_of_reduction(uint32_t op) {
  return op <= kMinimum ? kReductions[op] : "reduction " + std::to_string(op);
}

std::string why_no_reduction(uint32_t type, uint32_t op) {
  if (op > kMinimum) return "it has sum, prod, max and min";
  switch (type) {
    case kInt8:
    case kInt32:
    case kInt64:
    case kFloat16:
    case kFloat32: return "";
    case kInt16:
    case kBfloat16: return op == kProduct ? "prod takes neither int16 nor bfloat16" : "";
    default: return "it reduces int8, int16, int32, int64, float16, float32 and bfloat16";
  }
}

void reduce(char* out, const std::vector<const char*>& inputs, size_t count, uint32_t type,
            uint32_t op) {
  switch (type) {
    case kInt8: return reduce_as<int8_t>(out, inputs, count, op);
    case kInt16: return reduce_as<int16_t>(out, inputs, count, op);
    case kInt32: return reduce_as<int32_t>(out, inputs, count, op);
    case kInt64: return reduce_as<int64_t>(out, inputs, count, op);
    case kFloat32: return reduce_as<float>(out, inputs, count, op);
    case kFloat16: return reduce_halves(out, inputs, count, op, widen_half, narrow_half);
    default: return reduce_halves(out, inputs, count, op, widen_brain, narrow_brain);
  }
}

}  // namespace hccl
