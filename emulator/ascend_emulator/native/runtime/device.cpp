// Devices, contexts, properties and settings; what has no effect here is accepted and ignored.
#include "device.h"

#include <strings.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "abi.h"
#include "options.h"
#include "report.h"

namespace emulator {
namespace {

// Devices that the runtime offers, as indices of emulated devices, in the order given. As with
// the real variable, the first entry that is no device ends the list.
std::vector<int> visible_devices() {
  std::vector<int> out;
  const char* text = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!text) {
    for (int i = 0; i < options().devices; ++i) out.push_back(i);
    return out;
  }
  while (*text) {
    char* end;
    const long index = std::strtol(text, &end, 10);
    if (end == text || index < 0 || index >= options().devices) break;
    out.push_back(static_cast<int>(index));
    text = *end == ',' ? end + 1 : end;
  }
  return out;
}

const std::vector<int>& devices() {
  static const auto& list = *new std::vector<int>(visible_devices());
  return list;
}

thread_local int device_of_thread = -1;

struct State {
  std::mutex mutex;
  bool initialised = false;
  int default_device = -1;  // for threads that set none; -1: they are refused
  std::set<int> in_use;
  int64_t settings[8] = {};
};

State& state() {
  static State& instance = *new State;
  return instance;
}

char contexts[64];  // their addresses are the handles

int64_t cores_of(bool vector) {
  const auto& soc = options().soc;
  const bool small = soc.rfind("Ascend310", 0) == 0;
  return small ? 8 : vector ? 48 : 24;
}

// The entry "defaultDevice" of aclInit's configuration file: {"default_device": "0"}.
int default_device_of(const char* path) {
  if (!path) return -1;
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::smatch match;
  static const std::regex entry(R"re("default_device"\s*:\s*"(\d+)")re");
  return std::regex_search(text, match, entry) ? std::stoi(match[1]) : -1;
}

constexpr int kDriverPackage = 7;  // of aclCANNPackageName

const std::string& version_of(bool driver) {
  return driver ? options().driver : options().cann;
}

constexpr int kAttributeAiCpuCores = 1;
constexpr int kAttributeAiCores = 101, kAttributeCubeCores = 102, kAttributeVectorCores = 201;
constexpr int kAttributeMemory = 301, kAttributeCache = 302;
constexpr int64_t kCacheBytes = int64_t{192} << 20;

}  // namespace

int current_device() { return device_of_thread; }
int device_count() { return static_cast<int>(devices().size()); }

aclError need_device(const char* call) {
  if (device_of_thread >= 0) return acl::kSuccess;
  std::unique_lock lock(state().mutex);
  const int device = state().default_device;
  if (device < 0) {
    lock.unlock();
    return misuse(acl::kNoContext, std::string(call) +
                                       " on a thread that set no device: call set_device in it");
  }
  const auto& in_use = state().in_use;
  const int other = in_use.empty() || in_use.count(device) ? -1 : *in_use.begin();
  state().in_use.insert(device);
  lock.unlock();
  device_of_thread = device;
  if (other >= 0)
    hazard(std::string(call) + " on a thread that set no device works on npu:" +
           std::to_string(device) + ", the default, in a process that set npu:" +
           std::to_string(other) + " (missing set_device in the thread)");
  return acl::kSuccess;
}

bool driver_updates_tasks() {
  int major = 0, minor = 0;
  if (std::sscanf(options().driver.c_str(), "%d.%d", &major, &minor) != 2) return true;
  if (major != 25 || minor != 0) return major >= 25;
  return strncasecmp(options().driver.c_str(), "25.0.RC1.alpha", 14) != 0;
}

}  // namespace emulator

using namespace emulator;

ACL_API aclError aclInit(const char* configuration) {
  EMULATOR_CALL();
  std::lock_guard lock(state().mutex);
  if (state().initialised) return acl::kRepeatInitialize;
  state().initialised = true;
  state().default_device = default_device_of(configuration);
  install_exit_report();
  return acl::kSuccess;
}

ACL_API aclError aclFinalize() {
  EMULATOR_CALL();
  return acl::kSuccess;
}

ACL_API aclError aclrtGetDeviceCount(uint32_t* count) {
  EMULATOR_CALL();
  *count = static_cast<uint32_t>(device_count());
  return acl::kSuccess;
}

ACL_API aclError aclrtSetDevice(int32_t device) {
  EMULATOR_CALL();
  if (device < 0 || device >= device_count())
    return misuse(acl::kInvalidDevice, "npu:" + std::to_string(device) + " does not exist, " +
                                           std::to_string(device_count()) + " devices do");
  device_of_thread = device;
  std::lock_guard lock(state().mutex);
  state().in_use.insert(device);
  return acl::kSuccess;
}

ACL_API aclError aclrtGetDevice(int32_t* device) {
  EMULATOR_CALL();
  *device = device_of_thread;
  if (*device >= 0) return acl::kSuccess;
  std::lock_guard lock(state().mutex);
  *device = state().default_device;  // which isn't set by asking
  if (*device >= 0) return acl::kSuccess;
  return fail(acl::kNoContext, "no device was set on this thread");
}

ACL_API aclError aclrtResetDevice(int32_t device) {
  EMULATOR_CALL();
  std::lock_guard lock(state().mutex);
  state().in_use.erase(device);
  return acl::kSuccess;
}

ACL_API aclError aclrtGetCurrentContext(aclrtContext* context) {
  EMULATOR_CALL();
  if (device_of_thread < 0) return fail(acl::kNoContext, "no device was set on this thread");
  *context = &contexts[device_of_thread];
  return acl::kSuccess;
}

ACL_API aclError aclrtSetCurrentContext(aclrtContext context) {
  EMULATOR_CALL();
  if (context) device_of_thread = static_cast<int>(static_cast<char*>(context) - contexts);
  return acl::kSuccess;
}

ACL_API aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  EMULATOR_CALL();
  std::lock_guard lock(state().mutex);
  if (flags) *flags = 0;
  *active = static_cast<int32_t>(state().in_use.count(device));
  return acl::kSuccess;
}

ACL_API aclError aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t* logical) {
  EMULATOR_CALL();
  if (user < 0 || user >= device_count()) return fail(acl::kInvalidDevice, "no such device");
  *logical = devices()[user];
  return acl::kSuccess;
}

ACL_API const char* aclrtGetSocName() {
  EMULATOR_CALL();
  return options().soc.c_str();
}

ACL_API aclError aclsysGetVersionStr(char* package, char* version) {
  EMULATOR_CALL();
  std::strcpy(version, version_of(std::strcmp(package, "driver") == 0).c_str());
  return acl::kSuccess;
}

ACL_API aclError aclsysGetCANNVersion(int package, acl::PackageVersion* out) {
  EMULATOR_CALL();
  std::memset(out, 0, sizeof *out);
  std::snprintf(out->version, sizeof out->version, "%s", version_of(package == kDriverPackage).c_str());
  return acl::kSuccess;
}

ACL_API aclError aclGetDeviceCapability(uint32_t, int what, int64_t* value) {
  EMULATOR_CALL();
  *value = what == 0 ? cores_of(false) : what == 1 ? cores_of(true) : kCacheBytes;
  return acl::kSuccess;
}

ACL_API aclError aclrtGetDeviceInfo(uint32_t, int what, int64_t* value) {
  EMULATOR_CALL();
  switch (what) {
    case kAttributeAiCpuCores: *value = 6; break;
    case kAttributeAiCores:
    case kAttributeCubeCores: *value = cores_of(false); break;
    case kAttributeVectorCores: *value = cores_of(true); break;
    case kAttributeMemory: *value = static_cast<int64_t>(options().memory_bytes); break;
    case kAttributeCache: *value = kCacheBytes; break;
    default: *value = 0;
  }
  return acl::kSuccess;
}

ACL_API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  EMULATOR_CALL();
  *can = 1;  // all devices share one reservation
  return acl::kSuccess;
}

ACL_API aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) {
  EMULATOR_CALL();
  return acl::kSuccess;
}

ACL_API aclError aclrtDeviceGetBareTgid(int32_t* process) {
  EMULATOR_CALL();
  *process = getpid();
  return acl::kSuccess;
}

// An infinity/NaN mode, bfloat16 and no just-in-time compilation, as on A2 and A3.
ACL_API aclError aclGetCannAttributeList(const int** list, size_t* count) {
  EMULATOR_CALL();
  static const int attributes[] = {0, 1, 2};
  *list = attributes;
  *count = 3;
  return acl::kSuccess;
}

ACL_API aclError aclGetCannAttribute(int attribute, int32_t* value) {
  EMULATOR_CALL();
  *value = attribute != 2;
  return acl::kSuccess;
}

ACL_API aclError aclrtSetSysParamOpt(int option, int64_t value) {
  EMULATOR_CALL();
  state().settings[option & 7] = value;
  return acl::kSuccess;
}

ACL_API aclError aclrtCtxSetSysParamOpt(int option, int64_t value) {
  EMULATOR_CALL();
  state().settings[option & 7] = value;
  return acl::kSuccess;
}

ACL_API aclError aclrtGetSysParamOpt(int option, int64_t* value) {
  EMULATOR_CALL();
  *value = state().settings[option & 7];
  return acl::kSuccess;
}

ACL_API aclError aclrtGetLastError(int) {
  EMULATOR_CALL();
  return acl::kSuccess;
}

ACL_API aclError aclrtPeekAtLastError(int) {
  EMULATOR_CALL();
  return acl::kSuccess;
}

ACL_API aclError aclrtSetDeviceSatMode(int) {
  EMULATOR_CALL();
  return acl::kSuccess;
}

ACL_API aclError aclrtSetOpExecuteTimeOut(uint32_t) {
  EMULATOR_CALL();
  return acl::kSuccess;
}

ACL_API aclError aclrtSetOpWaitTimeout(uint32_t) {
  EMULATOR_CALL();
  return acl::kSuccess;
}

ACL_API aclError aclSetCompileopt(int, const char*) {
  EMULATOR_CALL();
  return acl::kSuccess;
}

ACL_API size_t aclGetCompileoptSize(int) {
  EMULATOR_CALL();
  return sizeof "disable";
}

ACL_API aclError aclGetCompileopt(int, char* value, size_t size) {
  EMULATOR_CALL();
  std::snprintf(value, size, "disable");
  return acl::kSuccess;
}

ACL_API void aclAppLog(int level, const char* function, const char*, uint32_t, const char* format,
                       ...) {
  constexpr int kError = 3;
  if (level < kError || !options().trace) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  say("log of %s: %s", function, text);
}
