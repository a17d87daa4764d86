// What `ascend-emulator` set for this process; the names are listed in ascend_emulator/options.py.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace emulator {

enum class Delay { kNone, kEqual, kSkewed };

struct Options {
  std::string soc = "Ascend910B1";
  std::string cann = "9.1.0";
  std::string driver = "25.5.1";
  int devices = 1;
  size_t memory_bytes = size_t{8} << 30;  // per device
  int streams = 2048;       // of a device
  int hccl_streams = 2;     // that a communication group holds in each graph that it is captured in
  Delay delay = Delay::kNone;
  bool hazards_are_errors = true;
  std::vector<std::string> allowed_hazards;  // patterns of a shell, which may occur in a message
  bool trace = false;
  std::string report_folder;  // empty: no report
  int hang_seconds = 30;      // how long a stream may wait for a value before it counts as hung
  bool stale_lengths = false;  // a fault: updates of task groups leave the captured tasks alone
};

const Options& options();

}  // namespace emulator
