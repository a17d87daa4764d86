// The part of the ACL binary interface that torch_npu uses, declared from its public documentation.
//
// The wheel ships CANN's own headers under their own licence; nothing here includes them. Only what
// crosses the library boundary is declared: enumerators are plain integers with the published values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../runtime_api.h"

#define ACL_API EMULATOR_API

using aclError = int;
using aclrtStream = void*;
using aclrtEvent = void*;
using aclrtContext = void*;
using aclmdlRI = void*;
using aclrtTaskGrp = void*;
using aclrtHostFunc = void (*)(void*);

namespace acl {

enum Status : int {
  kSuccess = 0,
  kRepeatInitialize = 100002,
  kInvalidParameter = 107000,
  kInvalidDevice = 107001,
  kNoContext = 107002,
  kStreamContext = 107003,
  kUnaligned = 107008,
  kInvalidHandle = 107017,
  kWaitTimeout = 107019,
  kCaptureDependency = 107024,
  kStreamUnjoined = 107025,
  kStreamCaptured = 107027,
  kEventCaptured = 107028,
  kStreamNotCaptured = 107029,
  kNotAllowedInCapture = 107030,
  kTaskGroupStatus = 107033,
  kCaptureUnmatched = 107036,
  kNotSupported = 207000,
  kOutOfMemory = 207001,
  kNoStreamResource = 207008,
  kCannotUpdate = 207019,
  kInternalError = 507000,
  kKernelFault = 507015,
  kCaptureInvalidated = 507903,
};

enum CopyKind : int {
  kHostToHost = 0,
  kHostToDevice = 1,
  kDeviceToHost = 2,
  kDeviceToDevice = 3,
  kDefaultKind = 4,
  kInnerDeviceToDevice = 6,
  kInterDeviceToDevice = 7,
};

enum StreamStatus : int { kStreamComplete = 0, kStreamNotReady = 1 };
enum EventStatus : int { kEventNotReady = 0, kEventComplete = 1 };
enum CaptureStatus : int { kCaptureNone = 0, kCaptureActive = 1, kCaptureInvalid = 2 };
enum CaptureMode : int { kModeGlobal = 0, kModeThreadLocal = 1, kModeRelaxed = 2 };
enum Location : int { kLocationHost = 0, kLocationDevice = 1, kLocationUnregistered = 2 };
enum WaitFlag : uint32_t { kWaitGreaterEqual = 0, kWaitEqual = 1 };

struct MemoryLocation {
  uint32_t id;
  int type;
};

struct PointerAttributes {
  MemoryLocation location;
  uint32_t page_size;
  uint32_t reserved[4];
};

struct PhysicalProperties {
  int handle_type, allocation_type, attribute;
  MemoryLocation location;
  uint64_t reserved;
};

// Of the attributes of physical memory, those with pages of 1 GiB; all others here have 2 MiB.
enum MemoryAttribute : int { kHbmHuge1G = 10, kHbmP2pHuge1G = 11, kMemHuge1G = 14, kMemP2pHuge1G = 17 };

struct PackageVersion {
  char version[128];
  char parts[4][64];
  char reserved[128];
};

}  // namespace acl
