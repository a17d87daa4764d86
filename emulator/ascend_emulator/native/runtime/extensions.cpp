// What libraries with custom operators call while they are loaded: they register their device
// binaries and a callback, and ask for the level of the log. Their kernels can't run here; the
// operators have references (operators/custom.py), and a launch past those is a trap.
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "abi.h"
#include "report.h"

using namespace emulator;

namespace {
int registered;  // its address stands for every binary and every function in one
}

ACL_API int aclrtBinaryLoadFromData(const void*, size_t, const void*, void** binary) {
  EMULATOR_CALL();
  *binary = &registered;
  return acl::kSuccess;
}

ACL_API int aclrtBinaryUnLoad(void*) {
  EMULATOR_CALL();
  return acl::kSuccess;
}

ACL_API int aclrtBinaryGetFunction(void*, const char*, void** function) {
  EMULATOR_CALL();
  *function = &registered;
  return acl::kSuccess;
}

ACL_API int aclrtBinaryGetFunctionByEntry(void*, uint64_t, void** function) {
  EMULATOR_CALL();
  *function = &registered;
  return acl::kSuccess;
}

ACL_API int aclrtRegStreamStateCallback(const char*, void*, void*) {
  EMULATOR_CALL();
  return acl::kSuccess;
}

// No level of the log is on.
ACL_API int32_t CheckLogLevel(int32_t, int32_t) { return 0; }
ACL_API void DlogRecord(int32_t, int32_t, const char*, ...) {}

ACL_API int32_t mmGetTid() { return static_cast<int32_t>(syscall(SYS_gettid)); }

ACL_API int memcpy_s(void* to, size_t room, const void* from, size_t count) {
  if (count > room) return ERANGE;
  std::memcpy(to, from, count);
  return 0;
}

ACL_API int strcpy_s(char* to, size_t room, const char* from) {
  return memcpy_s(to, room, from, std::strlen(from) + 1);
}
