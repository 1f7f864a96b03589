// Operators whose kernel is not the CPU's on the same bytes: those that make memory, copy, or read a number.
//
// Their Python kernels are in _factories.py and _copies.py.
#pragma once

#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/strides.h>

#include "front.h"
#include "order.h"
#include "tensors.h"

namespace emulator {

// `empty` and `empty_strided`: torch_npu's allocation, then poison.
class Empty final : public InFront {
 public:
  Empty(const OperatorHandle& op, const Original& original) : InFront(op), original_(original) {}
  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (emulator_slow) return in_python(op, keys, stack);
    original_(stack);
    tell_allocated(stack->back().toTensor());
    poison(stack->back().toTensor());
  }

 private:
  const Original& original_;
};

// `empty_like`, with the strides that it has on the CPU.
class EmptyLike final : public InFront {
 public:
  using InFront::InFront;
  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const IValue* own = stack->data() + stack->size() - 6;
    const at::Tensor& self = own[0].toTensor();
    const auto device = own[3].isNone() ? self.device() : own[3].toDevice();
    if (emulator_slow || device.type() != NPU || !device.has_index() || self.layout() != c10::kStrided) {
      return in_python(op, keys, stack);
    }
    const auto format = own[5].isNone() ? c10::MemoryFormat::Preserve : own[5].toMemoryFormat();
    const auto type = own[1].isNone() ? self.scalar_type() : own[1].toScalarType();
    auto made = allocate(self.sizes(), strides(self, format), type, device);
    poison(made);
    torch::jit::drop(*stack, 6);
    stack->emplace_back(std::move(made));
  }

 private:
  static std::vector<int64_t> strides(const at::Tensor& self, c10::MemoryFormat format) {
    switch (format) {
      case c10::MemoryFormat::Preserve:
        if (self.is_non_overlapping_and_dense()) return self.strides().vec();
        return at::infer_dense_strides(self.sizes(), self.strides());
      case c10::MemoryFormat::ChannelsLast: return c10::get_channels_last_strides_2d(self.sizes());
      case c10::MemoryFormat::ChannelsLast3d: return c10::get_channels_last_strides_3d(self.sizes());
      default: {
        const auto plain = c10::contiguous_strides(self.sizes());
        return {plain.begin(), plain.end()};
      }
    }
  }
};

// `zeros`, `ones` and `full`: allocated on the device and filled in place.
class Filled final : public InFront {
 public:
  Filled(const OperatorHandle& op, std::optional<c10::Scalar> value) : InFront(op), value_(value) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const IValue* own = stack->data() + stack->size() - count;
    const IValue& dtype = own[count - 4];
    const IValue& given = own[count - 2];
    if (emulator_slow || (!value_ && dtype.isNone())) return in_python(op, keys, stack);
    const auto sizes = own[0].toDimVector();
    for (const int64_t size : sizes) {
      if (size < 0) return in_python(op, keys, stack); // refuses it
    }
    const auto device = given.isNone() || !given.toDevice().has_index() ? current_device() : given.toDevice();
    const auto type = dtype.isNone() ? c10::typeMetaToScalarType(c10::get_default_dtype()) : dtype.toScalarType();
    auto made = allocate(sizes, c10::contiguous_strides(sizes), type, device);
    if (!tell("aten::fill_", "self", made)) {
      made = at::Tensor(); // the Python kernel gets the same memory
      return in_python(op, keys, stack);
    }
    if (made.numel()) {
      at::AutoDispatchBelowADInplaceOrView below;
      Aliases()(made).fill_(value_ ? *value_ : own[1].toScalar());
    }
    torch::jit::drop(*stack, count);
    stack->emplace_back(std::move(made));
  }

 private:
  const std::optional<c10::Scalar> value_;
};

// Blocking copies; the rules of non-blocking ones are in _copies.py.
class Copy final : public InFront {
 public:
  using InFront::InFront;
  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (emulator_slow || !at_once(stack)) in_python(op, keys, stack);
  }

 private:
  static bool at_once(Stack* stack) {
    const IValue* own = stack->data() + stack->size() - 3;
    const at::Tensor &target = own[0].toTensor(), &source = own[1].toTensor();
    if (own[2].toBool()) return false;
    for (const auto* one : {&target, &source}) {
      if (!(one->is_cpu() || on_npu(*one)) || !has_bytes(*one)) return false;
    }
    if (emulator_order_on) {
      if (!target.is_cpu() && !source.is_cpu() && target.device() != source.device()) return false;
      Accesses accesses;
      accesses.add("aten::copy_", "src", source, false);
      accesses.add("aten::copy_", "self", target, true);
      if (!accesses.tell((target.is_cpu() ? source : target).device())) return false;
    }
    if (target.is_cpu() != source.is_cpu()) {
      if (!wait_for_stream((target.is_cpu() ? source : target).device())) return false;
    }
    {
      Aliases alias;
      at::AutoDispatchBelowADInplaceOrView below;
      const auto to = target.is_cpu() ? target : alias(target);
      to.copy_(source.is_cpu() ? source : alias(source));
    }
    torch::jit::drop(*stack, 2); // the target is the result
    return true;
  }
};

// What `.item()` calls.
class Item final : public InFront {
 public:
  using InFront::InFront;
  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const at::Tensor own = stack->back().toTensor();
    if (emulator_slow || !has_bytes(own) || !tell(own) || !wait_for_stream(own.device())) {
      return in_python(op, keys, stack);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    stack->back() = Aliases()(own).item();
  }

 private:
  static bool tell(const at::Tensor& read) {
    if (!emulator_order_on) return true;
    Accesses accesses;
    accesses.add("aten::_local_scalar_dense", "self", read, false);
    return accesses.tell(read.device());
  }
};

} // namespace emulator
