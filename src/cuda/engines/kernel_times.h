#pragma once
#include <cstdint>

#include "core/problem.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {

inline constexpr double kLaunchSeconds = 4e-6;

// What kernels take, from products' whole waves of tiles and from bytes. The figures are measured on an H200;
// what is told of other devices is a prediction: these figures in the ratio of the vendor's where they are
// known (device_models.cpp), else of processors.
class KernelTimes {
 public:
  KernelTimes(const Problem& problem, const Device& device);

  // A plain product [m, n, k] of cuBLASLt's: the last wave of tiles costs as much as a full one.
  double product(int64_t m, int64_t n, int64_t k) const;
  // The same as plain dot products.
  double dot_products(int64_t m, int64_t n, int64_t k) const;
  // A pass over [rows, columns] with so many bytes for each element.
  double moved(int64_t rows, int64_t columns, double bytes) const;

  const Device& device() const { return device_; }
  int64_t processors() const { return processors_; }
  double flop_per_processor() const { return rate_; }

  // What `part` says of a whole, which is done at most `width` at a time.
  template <class Part>
  static double in_parts(int64_t whole, int64_t width, const Part& part) {
    const int64_t parts = whole / width, rest = whole % width;
    return (parts > 0 ? static_cast<double>(parts) * part(width) : 0) + (rest > 0 ? part(rest) : 0);
  }

 private:
  const Device& device_;
  int64_t processors_;
  double rate_;         // of products of the problem's operands
  double memory_rate_;  // bytes a second
};

}  // namespace logitless::cuda
