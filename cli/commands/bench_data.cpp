#include "commands/bench_data.h"

#include <cmath>
#include <cstring>
#include <random>

#include "commands/bench_run.h"
#include "io/real_element.h"

namespace logitless::cli {

NormalNumbers::NormalNumbers(double std, logitless_dtype dtype, uint64_t seed) : values_(1 << 16) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, static_cast<float>(std));
  for (float& value : values_) value = normal(random);
  if (dtype == LOGITLESS_F32) return;
  const bool bf16 = dtype == LOGITLESS_BF16;
  for (float& value : values_) {
    bits_.push_back(bf16 ? float_to_bf16(value) : float_to_f16(value));
    value = bf16 ? bf16_to_float(bits_.back()) : f16_to_float(bits_.back());
  }
}

void NormalNumbers::write(size_t index, std::byte* to) const {
  if (bits_.empty()) {
    std::memcpy(to, &values_[slot(index)], sizeof(float));
  } else {
    std::memcpy(to, &bits_[slot(index)], sizeof(uint16_t));
  }
}

NormalNumbers bench_hidden(logitless_dtype dtype) {
  return {1, dtype, 1};
}

NormalNumbers bench_classifier(const BenchShape& shape, logitless_dtype dtype) {
  return {2 / std::sqrt(static_cast<double>(shape.dim)), dtype, 2};
}

std::vector<int32_t> bench_targets(const BenchShape& shape) {
  std::mt19937_64 random(3);
  std::uniform_int_distribution<int32_t> ids(0, static_cast<int32_t>(shape.vocab - 1));
  std::vector<int32_t> targets(static_cast<size_t>(shape.tokens));
  for (int32_t& target : targets) target = ids(random);
  return targets;
}

}  // namespace logitless::cli
