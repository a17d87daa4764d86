#include "options.h"

#include <cstdlib>

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
  o.report_folder = text("NPU_EMULATOR_REPORT", "");
  o.hang_seconds = static_cast<int>(number("NPU_EMULATOR_HANG_SECONDS", o.hang_seconds));
  return o;
}

}  // namespace

const Options& options() {
  static const Options& instance = *new Options(read());
  return instance;
}

}  // namespace emulator
