#pragma once
#include <cstddef>
#include <cstdint>
#include <logitless/logitless.hpp>
#include <vector>

namespace logitless::cli {

struct BenchShape;

// Normal numbers as a 16-bit or float32 dtype holds them: a pool read at a stride, as drawing each would take
// longer than the measurement.
class NormalNumbers {
 public:
  NormalNumbers(double std, logitless_dtype dtype, uint64_t seed);
  float value(size_t index) const { return values_[slot(index)]; }
  uint16_t bits(size_t index) const { return bits_[slot(index)]; }  // of a 16-bit dtype
  // One element of the dtype.
  void write(size_t index, std::byte* to) const;

 private:
  size_t slot(size_t index) const { return (index * 40503 + index / 65537) % values_.size(); }
  std::vector<float> values_;
  std::vector<uint16_t> bits_;  // empty for float32
};

// Hidden states, a classifier whose logits deviate by 2, and targets, the same on every device.
NormalNumbers bench_hidden(logitless_dtype dtype);
NormalNumbers bench_classifier(const BenchShape& shape, logitless_dtype dtype);
std::vector<int32_t> bench_targets(const BenchShape& shape);

}  // namespace logitless::cli
