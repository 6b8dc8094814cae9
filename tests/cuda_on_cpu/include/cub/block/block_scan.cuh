#pragma once
// The part of CUB's header of this name that device code uses.
#include "language.h"

namespace cub {

template <class T, int kThreads>
class BlockScan {
 public:
  struct TempStorage {
    T value[kThreads];
  };
  explicit BlockScan(TempStorage& storage) : storage_(storage) {}

  // After each function, a barrier must come before the storage is used again.
  void InclusiveSum(T own, T& sum) { scan(own, sum, 1); }
  void ExclusiveSum(T own, T& sum) { scan(own, sum, 0); }
  void ExclusiveSum(T own, T& sum, T& of_all) {
    scan(own, sum, 0);
    of_all = T{};
    for (const T& value : storage_.value) of_all += value;
  }

 private:
  void scan(T own, T& sum, unsigned with_own) {
    storage_.value[threadIdx.x] = own;
    __syncthreads();
    sum = T{};
    for (unsigned i = 0; i < threadIdx.x + with_own; ++i) sum += storage_.value[i];
  }
  TempStorage& storage_;
};

}  // namespace cub
