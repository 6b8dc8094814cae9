#pragma once
#include <cstdint>

#include "core/problem.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {

inline constexpr double kLaunchSeconds = 4e-6;

// Predicts the times of kernels, from whole waves of tiles in products and from bytes. The figures are
// measured on an H200. Times of other devices follow from their own measurements (Device::measured). Without
// these they scale the figures by the vendor's rates where they are known (device_models.cpp), otherwise by
// the number of processors.
class KernelTimes {
 public:
  KernelTimes(const Problem& problem, const Device& device);

  // Time of a plain product [m, n, k] by cuBLASLt: the last wave of tiles costs as much as a full one.
  double product(int64_t m, int64_t n, int64_t k) const;
  // Time of the product [m, n, k] by launch_dot_products().
  double dot_products(int64_t m, int64_t n, int64_t k) const;
  // Time of a pass over [rows, columns] with this many bytes for each element.
  double moved(int64_t rows, int64_t columns, double bytes) const;

  const Device& device() const { return device_; }
  int64_t processors() const { return processors_; }
  double flop_per_processor() const { return rate_; }

  // Adds up part(size) over a whole that is done in parts of at most `width`.
  template <class Part>
  static double in_parts(int64_t whole, int64_t width, const Part& part) {
    const int64_t parts = whole / width, rest = whole % width;
    return (parts > 0 ? static_cast<double>(parts) * part(width) : 0) + (rest > 0 ? part(rest) : 0);
  }

 private:
  const Device& device_;
  int64_t processors_;
  double rate_;               // of products with the problem's operands, for each processor
  double dot_products_rate_;  // of launch_dot_products(), likewise
  double memory_rate_;        // bytes a second
};

}  // namespace logitless::cuda
