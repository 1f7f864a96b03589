// One boxed kernel for every aten operator at the npu key: it runs the CPU kernel on the same bytes, at once.
//
// It stands in front of the Python kernel of _operators.py, which has the meaning: whenever a stream has pending work,
// a capture or an update is open (`emulator_slow`), or a call is out of the ordinary, the Python kernel gets the call
// untouched. It decides no order. What an operator needs comes as flags from `Plan` in _schema.py.
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>

#include "front.h"
#include "order.h"
#include "own.h"
#include "random.h"
#include "tensors.h"
#include "unemulated.h"

namespace emulator {

// As _native.py has them.
enum Flag : unsigned {
  STRICT = 1,
  RESIZES = 2,
  NEEDS_HOST = 4,
  IS_INDEX = 8,
  DRAWS = 16,
  DRAWS_FROM_DEFAULT = 32,
  TOUCHES_ROWS = 64
};
enum class Kind : uint8_t { PLAIN, TENSOR, TENSORS, DEVICE, GENERATOR, PIN_MEMORY };

const Originals& originals() {
  static const Originals* const all = new Originals; // never destroyed: torch's registry may be gone first
  return *all;
}

Kind kind_of(const c10::Argument& argument) {
  c10::TypePtr type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  if (auto list = type->cast<c10::ListType>()) {
    type = list->getElementType();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    return type->kind() == c10::TypeKind::TensorType ? Kind::TENSORS : Kind::PLAIN;
  }
  if (argument.name() == "pin_memory") return Kind::PIN_MEMORY;
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return Kind::TENSOR;
    case c10::TypeKind::DeviceObjType: return Kind::DEVICE;
    case c10::TypeKind::GeneratorType: return Kind::GENERATOR;
    default: return Kind::PLAIN;
  }
}

// The arguments of one call as the CPU kernel takes them.
class Lowered {
 public:
  Lowered(const std::vector<Kind>& kinds, unsigned flags) : kinds_(kinds), flags_(flags) {}

  // False when the call is out of the ordinary.
  bool lower(c10::ArrayRef<IValue> own) {
    stack.reserve(own.size());
    for (size_t i = 0; i < own.size(); i++) {
      const IValue& value = own[i];
      if (value.isNone() && kinds_[i] != Kind::PIN_MEMORY) {
        stack.emplace_back();
        continue;
      }
      switch (kinds_[i]) {
        case Kind::TENSOR:
          if (!push(value.toTensor())) return false;
          break;
        case Kind::TENSORS:
          if (!push_all(value)) return false;
          break;
        case Kind::DEVICE:
          if (!push(value.toDevice())) return false;
          break;
        case Kind::PIN_MEMORY:
          stack.emplace_back(false);
          break;
        default:
          stack.push_back(value);
      }
    }
    if (mixed_ && device_ && (flags_ & STRICT)) return false;
    return true;
  }

  Device device() {
    if (!device_) device_ = current_device();
    return *device_;
  }

  Stack stack;

 private:
  bool alias(const at::Tensor& tensor, at::Tensor& out) {
    if (!tensor.defined() || tensor.is_cpu()) {
      mixed_ |= tensor.defined() && tensor.dim() > 0;
      out = tensor;
      return true;
    }
    if (!on_npu(tensor) || !has_bytes(tensor)) return false;
    if (!device_) {
      device_ = tensor.device();
    } else if ((flags_ & STRICT) && tensor.device() != *device_ && tensor.dim()) {
      return false;
    }
    out = aliases_(tensor);
    return true;
  }

  bool push(const at::Tensor& tensor) {
    at::Tensor lowered;
    if (!alias(tensor, lowered)) return false;
    stack.emplace_back(std::move(lowered));
    return true;
  }

  bool push_all(const IValue& value) {
    if (value.isTensorList()) {
      c10::List<at::Tensor> lowered;
      const auto own = value.toTensorList();
      lowered.reserve(own.size());
      for (size_t i = 0; i < own.size(); i++) {
        at::Tensor one;
        if (!alias(own.get(i), one)) return false;
        lowered.push_back(std::move(one));
      }
      stack.emplace_back(std::move(lowered));
      return true;
    }
    c10::List<std::optional<at::Tensor>> lowered;
    const auto own = value.toOptionalTensorList();
    lowered.reserve(own.size());
    for (size_t i = 0; i < own.size(); i++) {
      const std::optional<at::Tensor> item = own.get(i);
      if (!item) {
        lowered.push_back(std::nullopt);
        continue;
      }
      at::Tensor one;
      if (!alias(*item, one)) return false;
      lowered.push_back(std::move(one));
    }
    stack.emplace_back(std::move(lowered));
    return true;
  }

  bool push(Device device) {
    if (device.type() != NPU) return false;
    if (!device_) device_ = device.has_index() ? device : current_device();
    stack.emplace_back(Device(c10::kCPU));
    return true;
  }

  const std::vector<Kind>& kinds_;
  const unsigned flags_;
  Aliases aliases_;
  std::optional<Device> device_;
  bool mixed_ = false;
};

class Operator final : public InFront {
 public:
  Operator(const OperatorHandle& op, unsigned flags) : InFront(op), flags_(flags) {
    const auto& schema = op.schema();
    const auto& overload = schema.overload_name();
    name_ = schema.name() + (overload.empty() ? "" : "." + overload);
    for (const auto& argument : schema.arguments()) {
      if (argument.alias_info() && argument.alias_info()->isWrite()) written_.push_back(kinds_.size());
      names_.push_back(argument.name());
      kinds_.push_back(kind_of(argument));
    }
    for (const auto& result : schema.returns()) {
      int from = -1; // a new tensor
      const auto* info = result.alias_info();
      if (info && info->isWrite()) {
        for (size_t i : written_) {
          const bool same = schema.arguments()[i].alias_info()->beforeSets() == info->beforeSets();
          if (from < 0 && same) from = static_cast<int>(i);
        }
      }
      returns_.push_back(from);
    }
  }

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (emulator_slow || !at_once(op, stack)) in_python(op, keys, stack);
  }

 private:
  bool at_once(const OperatorHandle& op, Stack* stack) {
    const size_t count = kinds_.size(), base = stack->size() - count;
    const c10::ArrayRef<IValue> own(stack->data() + base, count);
    Lowered lowered(kinds_, flags_);
    if (!lowered.lower(own)) return false;
    if (emulator_order_on && ((flags_ & TOUCHES_ROWS) || !tell_arguments(own, lowered.device()))) return false;
    if (needs_data(own) && !wait_for_stream(lowered.device())) return false;
    if (flags_ & DRAWS) {
      for (size_t i = 0; i < count; i++) {
        if (kinds_[i] == Kind::GENERATOR) lowered.stack[i] = seeded(own[i], lowered.device());
      }
    }
    std::optional<DefaultGenerator> random;
    if (flags_ & DRAWS_FROM_DEFAULT) random.emplace(seeded(IValue(), lowered.device()));
    Stack& run = lowered.stack;
    c10::SmallVector<IValue, 4> outputs;
    if (flags_ & RESIZES) {
      for (size_t i : written_) outputs.push_back(run[i]);
    }
    {
      at::AutoDispatchBelowADInplaceOrView below;
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      if (flags_ & RESIZES) {
        try {
          op.redispatchBoxed(CPU_KEYS, &run);
        } catch (const c10::Error& error) {
          if (std::string(error.what_without_backtrace()).find("not resizable") == std::string::npos) throw;
          return false; // the Python kernel resizes on the device
        }
      } else {
        op.redispatchBoxed(CPU_KEYS, &run);
      }
      for (size_t i = 0; i < outputs.size(); i++) bring_home(own[written_[i]], outputs[i]);
    }
    for (size_t i = 0; i < returns_.size(); i++) {
      if (returns_[i] < 0 && !lift_value(run[i], lowered)) return false;
    }
    for (size_t i = 0; i < returns_.size(); i++) {
      if (returns_[i] >= 0) run[i] = own[returns_[i]];
    }
    stack->resize(base);
    for (auto& value : run) stack->push_back(std::move(value));
    return true;
  }

  bool needs_data(c10::ArrayRef<IValue> own) const {
    if (flags_ & NEEDS_HOST) return true;
    if (!(flags_ & IS_INDEX)) return false;
    const auto indices = own[1].toOptionalTensorList();
    for (size_t i = 0; i < indices.size(); i++) {
      const std::optional<at::Tensor> index = indices.get(i);
      if (!index || !index->defined()) continue;
      if (index->scalar_type() == c10::kBool || index->scalar_type() == c10::kByte) return true;
    }
    return false;
  }

  // An out= kernel has given its alias another shape within the same bytes: the npu tensor takes it over.
  static void bring_home(const IValue& own, const IValue& alias) {
    if (own.isTensor()) {
      const at::Tensor& target = own.toTensor();
      const at::Tensor& source = alias.toTensor();
      if (!target.defined() || !on_npu(target) || target.sizes() == source.sizes()) return;
      const at::Tensor result = source.clone(); // where the target's bytes are
      target.resize_(result.sizes());
      target.as_strided_(result.sizes(), result.strides());
      Aliases()(target).copy_(result);
    } else if (own.isTensorList()) {
      const auto targets = own.toTensorVector(), sources = alias.toTensorVector();
      for (size_t i = 0; i < targets.size(); i++) bring_home(targets[i], sources[i]);
    }
  }

  // False when the memory of a result is in a race.
  bool lift_value(IValue& value, Lowered& lowered) const {
    if (value.isTensor()) {
      value = lift(value.toTensor(), lowered.device());
      return tell_result(value.toTensor());
    }
    if (!value.isTensorList()) return true;
    c10::List<at::Tensor> lifted;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      auto one = lift(tensor, lowered.device());
      if (!tell_result(one)) return false;
      lifted.push_back(std::move(one));
    }
    value = lifted;
    return true;
  }

  bool tell_result(const at::Tensor& result) const {
    return !result.defined() || tell(name_.c_str(), "result", result);
  }

  bool tell_arguments(c10::ArrayRef<IValue> own, Device device) const {
    Accesses accesses;
    size_t next = 0; // of the written arguments
    for (size_t i = 0; i < own.size(); i++) {
      const bool written = next < written_.size() && written_[next] == i;
      next += written;
      const auto add = [&](const at::Tensor& tensor) {
        if (tensor.defined() && on_npu(tensor)) accesses.add(name_.c_str(), names_[i].c_str(), tensor, written);
      };
      if (own[i].isTensor()) {
        add(own[i].toTensor());
      } else if (own[i].isTensorList()) {
        for (const at::Tensor& tensor : own[i].toTensorVector()) add(tensor);
      } else if (kinds_[i] == Kind::TENSORS && own[i].isList()) {
        for (const auto& tensor : own[i].toOptionalTensorVector()) {
          if (tensor) add(*tensor);
        }
      }
    }
    return accesses.tell(device);
  }

  const unsigned flags_;
  std::string name_;
  std::vector<std::string> names_;
  std::vector<Kind> kinds_;
  std::vector<size_t> written_;
  std::vector<int> returns_; // per result the argument that it is, or -1
};

template <class Kernel, class... Arguments>
void put_in_front(const OperatorHandle& op, Arguments&&... arguments) {
  static auto* const handles = new std::vector<c10::RegistrationHandleRAII>; // as `originals`
  handles->push_back(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), DispatchKey::PrivateUse1,
      c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op, std::forward<Arguments>(arguments)...)),
      std::nullopt, nullptr, "ascend_emulator"));
}

void put_in_front(const std::string& name, const std::string& overload, unsigned flags) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const std::string full = overload.empty() ? name : name + "." + overload;
  if (full == "aten::empty.memory_format") return put_in_front<Empty>(op, originals().empty);
  if (full == "aten::empty_strided") return put_in_front<Empty>(op, originals().empty_strided);
  if (full == "aten::empty_like") return put_in_front<EmptyLike>(op);
  if (full == "aten::zeros") return put_in_front<Filled>(op, c10::Scalar(0));
  if (full == "aten::ones") return put_in_front<Filled>(op, c10::Scalar(1));
  if (full == "aten::full") return put_in_front<Filled>(op, std::nullopt);
  if (full == "aten::copy_") return put_in_front<Copy>(op);
  if (full == "aten::_local_scalar_dense") return put_in_front<Item>(op);
  put_in_front<Operator>(op, flags);
}

void name_missing(const std::string& name, const std::string& overload) {
  put_in_front<Unemulated>(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()));
}

} // namespace emulator

// All return NULL, or what went wrong (valid until the next call).
static std::string failure;

template <class Call>
static const char* guarded(Call call) {
  try {
    call();
    return nullptr;
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
}

extern "C" __attribute__((visibility("default"))) const char* emulator_take_originals() {
  return guarded([] { emulator::originals(); });
}

extern "C" __attribute__((visibility("default"))) const char* emulator_put_in_front(
    const char* name, const char* overload, unsigned flags) {
  return guarded([&] { emulator::put_in_front(name, overload, flags); });
}

extern "C" __attribute__((visibility("default"))) const char* emulator_name_missing(
    const char* name, const char* overload) {
  return guarded([&] { emulator::name_missing(name, overload); });
}
