// Tells the C runtime which bytes a call reads and writes, as order/_words.py does for the Python kernels. It finds no
// race itself and reports none: when there is one, the Python kernel gets the call, finds it again and raises.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include "tensors.h"

extern "C" {
extern int emulator_order_on;
int emulator_order_access(void* stream, const int64_t* words, size_t count);
void emulator_order_allocated(uint64_t address, uint64_t size);
int emulator_locate(const void* address, uint64_t* start, uint64_t* size);
}

namespace c10_npu { // as torch_npu/csrc/core/npu/NPUStream.h has it, which needs all of torch_npu's headers

class NPUStream {
 public:
  ~NPUStream() {}
  void* stream() const;

 private:
  c10::Stream stream_;
};

NPUStream getCurrentNPUStream(c10::DeviceIndex device_index);

} // namespace c10_npu

namespace emulator {

inline const char* dtype_name(c10::ScalarType type) {
  switch (type) {
    case c10::kFloat: return "float32";
    case c10::kDouble: return "float64";
    case c10::kHalf: return "float16";
    case c10::kBFloat16: return "bfloat16";
    case c10::kLong: return "int64";
    case c10::kInt: return "int32";
    case c10::kShort: return "int16";
    case c10::kChar: return "int8";
    case c10::kByte: return "uint8";
    case c10::kBool: return "bool";
    default: return c10::toString(type);
  }
}

// The accesses of one call.
class Accesses {
 public:
  // Device and pinned memory; other memory is nobody else's. The names must stay.
  void add(const char* op, const char* argument, const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !tensor.numel()) return;
    const void* first = tensor.const_data_ptr();
    if (tensor.is_cpu() && emulator_locate(first, nullptr, nullptr) != PINNED) return;
    const auto text = [](const char* name) { return reinterpret_cast<int64_t>(name); };
    const int64_t head[] = {
        text(op), text(argument), text(dtype_name(tensor.scalar_type())), written, tensor.element_size(),
        reinterpret_cast<int64_t>(first), 0, tensor.dim()};
    words_.append(std::begin(head), std::end(head));
    words_.append(tensor.sizes().begin(), tensor.sizes().end());
    words_.append(tensor.strides().begin(), tensor.strides().end());
  }

  // False when there is a race.
  bool tell(Device device) const {
    if (words_.empty()) return true;
    void* stream = c10_npu::getCurrentNPUStream(device.index()).stream();
    return !emulator_order_access(stream, words_.data(), words_.size());
  }

 private:
  static constexpr int PINNED = -1;
  c10::SmallVector<int64_t, 64> words_;
};

inline bool tell(const char* op, const char* argument, const at::Tensor& written) {
  if (!emulator_order_on) return true;
  Accesses accesses;
  accesses.add(op, argument, written, true);
  return accesses.tell(written.device());
}

inline void tell_allocated(const at::Tensor& tensor) {
  if (!emulator_order_on) return;
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  emulator_order_allocated(reinterpret_cast<uint64_t>(storage.data()), storage.nbytes());
}

} // namespace emulator
