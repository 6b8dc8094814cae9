#pragma once
// The part of CUB's header of this name that the library uses.
#include "language.h"

namespace cub {

struct DeviceScan {
  template <class In, class Out, class Join, class First, class Count>
  static cudaError_t ExclusiveScan(void* scratch, size_t& bytes, In from, Out to, Join join, First first,
                                   Count count, cudaStream_t = nullptr) {
    if (scratch == nullptr) {
      bytes = 1;
      return cudaSuccess;
    }
    First sum = first;
    for (Count i = 0; i < count; ++i) {
      const First next = join(sum, from[i]);
      to[i] = sum;
      sum = next;
    }
    return cudaSuccess;
  }
};

}  // namespace cub
