// CPU tensors over the bytes of npu tensors, fresh npu tensors, and poison. It owns no memory and decides no order.
#pragma once

#include <cstring>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>

namespace emulator {

using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using c10::SafeKernelFunction;
using torch::jit::Stack;

constexpr DispatchKeySet CPU_KEYS(DispatchKey::CPU);
constexpr DispatchKeySet NPU_KEYS(DispatchKey::PrivateUse1);
constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int POISON_FLOATING = 0xFF; // both as poison.py has them
constexpr int POISON_OTHER = 0xA5;

inline bool on_npu(const at::Tensor& tensor) { return tensor.device().type() == NPU; }

inline bool has_bytes(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && tensor.unsafeGetTensorImpl()->has_storage();
}

inline Device current_device() { return c10::impl::VirtualGuardImpl(NPU).getDevice(); }

inline void poison(const at::Tensor& tensor) {
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const auto dtype = tensor.scalar_type();
  const bool floating = c10::isFloatingType(dtype) || c10::isComplexType(dtype);
  const int byte = floating ? POISON_FLOATING : POISON_OTHER;
  if (storage.nbytes()) std::memset(storage.mutable_data(), byte, storage.nbytes());
}

// The aliases of one call. Arguments that share an npu storage share a CPU storage, so that kernels see the overlap.
class Aliases {
 public:
  // A CPU tensor with the same bytes, sizes, strides and dtype. Its storage cannot grow: a kernel that tries throws.
  at::Tensor operator()(const at::Tensor& tensor) {
    const auto* own = tensor.unsafeGetTensorImpl();
    auto alias = at::detail::make_tensor<c10::TensorImpl>(storage_of(own->unsafe_storage()), CPU_KEYS, own->dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(own->sizes(), own->strides(), own->storage_offset());
    if (own->is_conj()) impl->_set_conj(true);
    if (own->is_neg()) impl->_set_neg(true);
    return alias;
  }

 private:
  c10::Storage storage_of(const c10::Storage& own) {
    for (const auto& [key, storage] : storages_) {
      if (key == own.unsafeGetStorageImpl()) return storage;
    }
    c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), own.nbytes(), c10::DataPtr(own.mutable_data(), Device(c10::kCPU)), nullptr,
        false));
    storages_.emplace_back(own.unsafeGetStorageImpl(), storage);
    return storage;
  }

  c10::SmallVector<std::pair<const c10::StorageImpl*, c10::Storage>, 4> storages_;
};

// torch_npu's own kernel of an operator; it must be taken before another one is put in its place.
class Original {
 public:
  Original(const char* name, const char* overload)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)),
        kernel_(op_.getComputedKernelForDispatchKey(DispatchKey::PrivateUse1)) {}
  void operator()(Stack* stack) const { kernel_.callBoxed(op_, NPU_KEYS, stack); }

 private:
  OperatorHandle op_;
  SafeKernelFunction kernel_;
};

struct Originals {
  Original empty{"aten::empty", "memory_format"};
  Original empty_strided{"aten::empty_strided", ""};
};

const Originals& originals();
void tell_allocated(const at::Tensor& tensor); // order.h

// A device tensor straight from torch_npu's allocator, without poison: the caller writes all of it.
inline at::Tensor allocate(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype, Device device) {
  Stack stack{sizes, strides, dtype, c10::kStrided, device, IValue()};
  originals().empty_strided(&stack);
  auto made = std::move(stack.back()).toTensor();
  tell_allocated(made);
  return made;
}

// An npu tensor with the contents, sizes and strides of a CPU tensor.
inline at::Tensor lift(const at::Tensor& computed, Device device) {
  if (!computed.defined() || !computed.is_cpu()) return computed;
  const at::Tensor plain = computed.resolve_conj().resolve_neg();
  auto made = allocate(plain.sizes(), plain.strides(), plain.scalar_type(), device);
  if (plain.numel()) {
    size_t last = 0; // of the elements, in the order of addresses
    for (int64_t i = 0; i < plain.dim(); i++) last += (plain.size(i) - 1) * plain.stride(i);
    std::memcpy(made.mutable_data_ptr(), plain.const_data_ptr(), (last + 1) * plain.element_size());
  }
  return made;
}

} // namespace emulator
