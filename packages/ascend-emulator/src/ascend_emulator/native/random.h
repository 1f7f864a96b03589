// CPU generators that stand in for npu generators, as _random.py makes them; the numbers drawn are the same.
#pragma once

#include <mutex>

#include <ATen/CPUGeneratorImpl.h>

#include "tensors.h"

namespace at_npu::detail {
const at::Generator& getDefaultNPUGenerator(c10::DeviceIndex device_index);
}

namespace emulator {

constexpr uint64_t SEED_MASK = 0x7FFFFFFFFFFFFFFF;

// A CPU generator for one draw of an npu generator, as `seeded` of _random.py makes it.
inline at::Generator seeded(const IValue& given, Device device) {
  auto source = given.isNone() ? at_npu::detail::getDefaultNPUGenerator(device.index()) : given.toGenerator();
  std::lock_guard<std::mutex> lock(source.mutex());
  const uint64_t offset = source.get_offset();
  source.set_offset(offset + 4);
  return at::detail::createCPUGenerator((source.current_seed() * 1000003 + offset) & SEED_MASK);
}

// The CPU's default generator, seeded from an npu generator's draw, and as it was before when this ends.
class DefaultGenerator {
 public:
  explicit DefaultGenerator(at::Generator draw) : default_(at::detail::getDefaultCPUGenerator()) {
    const uint64_t seed = at::check_generator<at::CPUGeneratorImpl>(draw)->random64() % SEED_MASK; // as torch.randint
    std::lock_guard<std::mutex> lock(default_.mutex());
    state_ = default_.get_state();
    default_.set_current_seed(seed);
  }
  ~DefaultGenerator() {
    std::lock_guard<std::mutex> lock(default_.mutex());
    default_.set_state(state_);
  }
  DefaultGenerator(const DefaultGenerator&) = delete;
  DefaultGenerator& operator=(const DefaultGenerator&) = delete;

 private:
  at::Generator default_;
  at::Tensor state_;
};

} // namespace emulator
