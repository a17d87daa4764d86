// Which device the calling thread uses.
#pragma once

namespace emulator {

int current_device();  // -1: none was set on this thread
int device_count();    // as ASCEND_RT_VISIBLE_DEVICES leaves them

}  // namespace emulator
