#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace logitless {

// A gradient as an array in the memory of the run's device.
struct GradientArray {
  void* data;
  DType dtype;
  int64_t size;  // elements
};

// Pointers of one run, as logitless/tensors.def lists them; null: no such tensor. Strides are in elements
// from row to row; the innermost dimension is contiguous.
struct Buffers {
#define LOGITLESS_TENSOR(name, NAME, element, ...) element* name = nullptr;
#define LOGITLESS_MATRIX(name, NAME, element, ...) \
  element* name = nullptr;                         \
  int64_t name##_stride = 0;
#include "logitless/tensors.def"

  bool operator==(const Buffers&) const = default;
};

}  // namespace logitless
