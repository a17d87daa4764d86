// Which device the calling thread uses.
#pragma once

#include "abi.h"
#include "report.h"

namespace emulator {

int current_device();  // -1: none was set on this thread
int device_count();    // as ASCEND_RT_VISIBLE_DEVICES leaves them

// For calls that CANN refuses on a thread without a device (107002): those that create streams and
// events, allocate, enqueue, capture or wait. If aclInit was given a default device, as torch_npu
// does from CANN 8.3.RC1 on, the thread is set to that one instead.
aclError need_device(const char* call);

// Task groups can be captured with any driver, and updated from 25.0.RC1 on.
bool driver_updates_tasks();

#define EMULATOR_DEVICE_CALL()                                                 \
  EMULATOR_CALL();                                                             \
  do {                                                                         \
    if (const auto refused = ::emulator::need_device(__func__)) return refused; \
  } while (0)

}  // namespace emulator
