#include "options.h"

#include <cstdlib>
#include <sstream>

namespace emulator {
namespace {

std::string text(const char* name, const std::string& fallback) {
  const char* value = std::getenv(name);
  return value && *value ? value : fallback;
}

long number(const char* name, long fallback) {
  const char* value = std::getenv(name);
  return value && *value ? std::atol(value) : fallback;
}

bool has_fault(const std::string& name) {
  return ("," + text("NPU_EMULATOR_FAULTS", "") + ",").find("," + name + ",") != std::string::npos;
}

std::vector<std::string> lines(const char* name) {
  std::istringstream all(text(name, ""));
  std::vector<std::string> out;
  for (std::string line; std::getline(all, line);)
    if (!line.empty()) out.push_back(line);
  return out;
}

Delay delay_of(const std::string& name) {
  if (name == "equal") return Delay::kEqual;
  if (name == "skewed") return Delay::kSkewed;
  return Delay::kNone;
}

Options read() {
  Options o;
  o.soc = text("NPU_EMULATOR_SOC", o.soc);
  o.cann = text("NPU_EMULATOR_CANN", o.cann);
  o.driver = text("NPU_EMULATOR_DRIVER", o.driver);
  o.devices = static_cast<int>(number("NPU_EMULATOR_DEVICES", o.devices));
  o.memory_bytes = static_cast<size_t>(number("NPU_EMULATOR_MEMORY", o.memory_bytes));
  o.streams = static_cast<int>(number("NPU_EMULATOR_STREAMS", o.streams));
  o.hccl_streams = static_cast<int>(number("NPU_EMULATOR_HCCL_STREAMS", o.hccl_streams));
  o.delay = delay_of(text("NPU_EMULATOR_DELAY", "none"));
  o.hazards_are_errors = text("NPU_EMULATOR_HAZARDS", "error") == "error";
  o.trace = number("NPU_EMULATOR_TRACE", 0) != 0;
  o.allowed_hazards = lines("NPU_EMULATOR_ALLOWED_HAZARDS");
  o.report_folder = text("NPU_EMULATOR_REPORT", "");
  o.hang_seconds = static_cast<int>(number("NPU_EMULATOR_HANG_SECONDS", o.hang_seconds));
  o.stale_lengths = has_fault("stale-lengths");
  return o;
}

}  // namespace

const Options& options() {
  static const Options& instance = *new Options(read());
  return instance;
}

}  // namespace emulator
