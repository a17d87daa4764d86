// The one aclnn operator that torch_npu calls past the dispatcher: it pads the tensors that a gather
// into a list of tensors receives to 512 bytes (ProcessGroupHCCL). Every other operator is replaced
// where it is registered (launcher/install.cpp).
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "abi.h"
#include "memory.h"
#include "report.h"
#include "stream.h"

namespace emulator {
namespace {

struct Tensor {
  std::vector<int64_t> sizes, strides;
  char* begin;
  size_t width;

  size_t count() const {
    size_t product = 1;
    for (const auto size : sizes) product *= static_cast<size_t>(size);
    return product;
  }
  // Bytes from the first element to the end of the last one.
  size_t span() const {
    if (!count()) return 0;
    size_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
    return (last + 1) * width;
  }
};

struct Scalar {
  bool is_zero;
};

using IntArray = std::vector<int64_t>;

struct Padding {
  Tensor input, output;
  IntArray before;  // elements in front, by dimension
};

// Bytes of an element of aclDataType; 0: not known here.
size_t width_of(int type) {
  switch (type) {
    case 2: case 4: case 12: case 35: case 36: return 1;       // int8, uint8, bool, float8
    case 1: case 6: case 7: case 27: return 2;                 // float16, (u)int16, bfloat16
    case 0: case 3: case 8: return 4;                          // float, (u)int32
    case 9: case 10: case 11: case 16: return 8;               // (u)int64, double, complex64
    case 17: return 16;                                        // complex128
    default: return 0;
  }
}

void pad(const Padding& p) {
  char *from = alias_of(p.input.begin), *to = alias_of(p.output.begin);
  std::memset(to, 0, p.output.span());
  const size_t dims = p.input.sizes.size();
  std::vector<int64_t> index(dims, 0);
  for (size_t left = p.input.count(); left; --left) {
    int64_t source = 0, target = 0;
    for (size_t i = 0; i < dims; ++i) {
      source += index[i] * p.input.strides[i];
      target += (index[i] + p.before[i]) * p.output.strides[i];
    }
    std::memcpy(to + target * p.input.width, from + source * p.input.width, p.input.width);
    for (size_t i = dims; i-- && ++index[i] == p.input.sizes[i];) index[i] = 0;
  }
}

}  // namespace
}  // namespace emulator

using namespace emulator;

ACL_API void* aclCreateTensor(const int64_t* sizes, uint64_t dims, int type, const int64_t* strides,
                              int64_t offset, int, const int64_t*, uint64_t, void* data) {
  const size_t width = width_of(type);
  return new Tensor{{sizes, sizes + dims}, {strides, strides + dims},
                    static_cast<char*>(data) + offset * static_cast<int64_t>(width), width};
}

ACL_API void* aclCreateScalar(const void* value, int type) {
  const std::string bytes(static_cast<const char*>(value), width_of(type));
  return new Scalar{bytes.find_first_not_of('\0') == std::string::npos};
}

ACL_API void* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return new IntArray(values, values + count);
}

ACL_API int aclDestroyTensor(const void* tensor) {
  delete static_cast<const Tensor*>(tensor);
  return acl::kSuccess;
}

ACL_API int aclDestroyScalar(const void* scalar) {
  delete static_cast<const Scalar*>(scalar);
  return acl::kSuccess;
}

ACL_API int aclDestroyIntArray(const void* array) {
  delete static_cast<const IntArray*>(array);
  return acl::kSuccess;
}

// `amounts`: two for each dimension, in front and after, from the last dimension on.
ACL_API int aclnnConstantPadNdGetWorkspaceSize(const Tensor* input, const IntArray* amounts,
                                               const Scalar* value, const Tensor* output,
                                               uint64_t* workspace, void** executor) {
  EMULATOR_CALL();
  *workspace = 0;
  bool is_known = value->is_zero && input->width && amounts->size() <= 2 * input->sizes.size();
  auto padding = std::make_unique<Padding>(Padding{*input, *output, {}});
  padding->before.assign(input->sizes.size(), 0);
  for (size_t i = 0; is_known && i < amounts->size(); ++i) {
    is_known = (*amounts)[i] >= 0;
    if (i % 2 == 0) padding->before[input->sizes.size() - 1 - i / 2] = (*amounts)[i];
  }
  if (!is_known)
    return misuse(acl::kNotSupported,
                  "aclnnConstantPadNd is emulated for zeros that are added to plain tensors");
  *executor = padding.release();
  return acl::kSuccess;
}

ACL_API int aclnnConstantPadNd(void*, uint64_t, void* executor, aclrtStream stream) {
  EMULATOR_CALL();
  std::shared_ptr<Padding> padding(static_cast<Padding*>(executor));
  count_kernel("aclnnConstantPadNd");
  Task task;
  task.name = "aclnnConstantPadNd";
  task.accesses = {{padding->input.begin, padding->input.span(), false},
                   {padding->output.begin, padding->output.span(), true}};
  task.run = [padding](Actor&) { pad(*padding); };
  return enqueue(stream_of(stream), std::move(task));
}
