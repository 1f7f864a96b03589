// What stands in front of a Python kernel, and when it may run a call at once. It owns no operator.
#pragma once

#include "tensors.h"

extern "C" {
extern int emulator_active; // nonzero: a wait of the host has something to do
extern int emulator_slow;   // nonzero: an operator has to look at its stream before it runs
}

namespace emulator {

// What a wait of the host does on an idle device; false: the Python kernel has to do it.
inline bool wait_for_stream(Device device) {
  if (emulator_active) return false;
  c10::impl::VirtualGuardImpl guard(NPU);
  guard.synchronizeStream(guard.getStream(device));
  return true;
}

// A kernel that stands in front of the Python kernel of the same operator.
class InFront : public c10::OperatorKernel {
 public:
  explicit InFront(const OperatorHandle& op) : python_(op.getComputedKernelForDispatchKey(DispatchKey::PrivateUse1)) {}

 protected:
  void in_python(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    python_.callBoxed(op, keys, stack);
  }

 private:
  SafeKernelFunction python_;
};

} // namespace emulator
