// The part of HCCL's binary interface that torch_npu looks up, declared from its public reference.
//
// As for the runtime, CANN's own headers are not included: enumerators are plain integers with the
// published values.
#pragma once

#include <cstddef>
#include <cstdint>

#define HCCL_API extern "C" __attribute__((visibility("default")))

namespace hccl {

enum Result : int {
  kSuccess = 0,
  kParameter = 1,
  kPointer = 2,
  kMemory = 3,
  kInternal = 4,
  kNotSupported = 5,
  kUnavailable = 7,
  kSystemCall = 8,
  kTimeout = 9,
  kRuntime = 15,
  kRemote = 21,
  kOutOfMemory = 24,
};

enum Reduction : uint32_t { kSum = 0, kProduct = 1, kMaximum = 2, kMinimum = 3 };

enum Type : uint32_t {
  kInt8 = 0,
  kInt16 = 1,
  kInt32 = 2,
  kFloat16 = 3,
  kFloat32 = 4,
  kInt64 = 5,
  kUint64 = 6,
  kUint8 = 7,
  kUint16 = 8,
  kUint32 = 9,
  kFloat64 = 10,
  kBfloat16 = 11,
  kFloat8E4M3 = 15,
  kFloat8E5M2 = 16,
};

constexpr size_t kRootInfoBytes = 4108;
constexpr size_t kNameBytes = 128;

// The beginning of HcclCommConfig, in the version that knows a name; later fields are ignored.
struct Config {
  size_t size;
  char reserved[16];
  uint32_t buffer_megabytes;
  uint32_t deterministic;
  char name[kNameBytes];
};
constexpr uint32_t kNotSet = 0xffffffff;

// One send or receive of HcclBatchSendRecv.
struct Item {
  int kind;  // 0: send, 1: receive
  void* buffer;
  uint64_t count;
  int type;
  uint32_t peer;
};

}  // namespace hccl
