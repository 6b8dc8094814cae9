#pragma once
// The part of CUB's header of this name that the library uses.
#include <numeric>
#include <vector>

#include "language.h"

namespace cub {

struct DeviceRadixSort {
  template <class Key, class Value>
  static cudaError_t SortPairs(void* scratch, size_t& bytes, const Key* keys, Key* sorted_keys,
                               const Value* values, Value* sorted_values, int32_t count, int begin_bit = 0,
                               int end_bit = sizeof(Key) * 8, cudaStream_t = nullptr) {
    if (scratch == nullptr) {
      bytes = 1;
      return cudaSuccess;
    }
    const auto bits = [&](int32_t i) {
      const auto key = static_cast<uint64_t>(keys[i]);
      return key >> begin_bit & ((uint64_t{1} << (end_bit - begin_bit)) - 1);
    };
    std::vector<int32_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return bits(a) < bits(b); });
    for (int32_t i = 0; i < count; ++i) {
      sorted_keys[i] = keys[order[static_cast<size_t>(i)]];
      sorted_values[i] = values[order[static_cast<size_t>(i)]];
    }
    return cudaSuccess;
  }
};

}  // namespace cub
