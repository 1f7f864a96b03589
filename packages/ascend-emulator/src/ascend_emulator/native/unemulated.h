// Operators for which there is no kernel: torch_npu's own one runs, and a launch that the runtime refused is named.
#pragma once

#include <cctype>
#include <string>

#include "tensors.h"

namespace emulator {

class Unemulated final : public c10::OperatorKernel {
 public:
  explicit Unemulated(const OperatorHandle& op)
      : original_(op.getComputedKernelForDispatchKey(DispatchKey::PrivateUse1)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    try {
      original_.callBoxed(op, keys, stack);
    } catch (const std::exception& error) {
      const auto launch = device_kernel(error.what());
      if (launch.empty()) throw;
      const auto& name = op.operator_name();
      Stack arguments{name.overload_name.empty() ? name.name : name.name + "." + name.overload_name, launch};
      c10::Dispatcher::singleton().findSchemaOrThrow("ascend_emulator::not_emulated", "").callBoxed(&arguments);
    }
  }

 private:
  // From what torch_npu says of operators that it builds as a graph, of aclnn functions and of atb operations.
  static std::string device_kernel(const std::string& text) {
    if (text.find("error code is 500002") != std::string::npos) return word_after(text, "OPS function error: ");
    if (text.find(" not in libopapi") != std::string::npos) return "aclnn" + word_after(text, "aclnn");
    const auto end = text.find(" CreateOperation failed");
    return end == std::string::npos ? "" : text.substr(0, end);
  }

  static std::string word_after(const std::string& text, const std::string& prefix) {
    const auto found = text.find(prefix);
    if (found == std::string::npos) return "";
    const auto start = found + prefix.size();
    auto end = start;
    while (end < text.size() && (std::isalnum(static_cast<unsigned char>(text[end])) || text[end] == '_')) end++;
    return text.substr(start, end - start);
  }

  SafeKernelFunction original_;
};

} // namespace emulator
