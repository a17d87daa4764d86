// The profiler's entry points, which torch_npu calls at import and at every launch: all off.
#include "abi.h"

ACL_API uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
ACL_API int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
ACL_API int32_t MsprofReportApi(uint32_t, void*) { return 0; }
ACL_API int32_t MsprofReportAdditionalInfo(uint32_t, void*, uint32_t) { return 0; }
ACL_API int32_t MsprofReportCompactInfo(uint32_t, void*, uint32_t) { return 0; }
ACL_API uint64_t MsprofSysCycleTime() { return 0; }
