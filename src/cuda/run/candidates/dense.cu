#include "cuda/rows/device_rows.cuh"
#include "cuda/run/candidates/candidates.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

// One block for each row.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    pick_products_kernel(CandidateLists lists, const int32_t* column, int64_t first_row, ConstMatrix products,
                         Real* picked) {
  const int64_t row = first_row + blockIdx.x, end = lists.begin(row + 1);
  const Real* from = products.row<Real>(blockIdx.x);
  for (int64_t e = lists.begin(row) + threadIdx.x; e < end; e += kThreads) {
    if (column[e] >= 0) picked[e] = from[column[e]];
  }
}

// One block for each row of a window. An element that is alone in its column is stored as it is. The others
// of a column are added up by the first of them, in their order.
template <class T, class Real = RealOf<T>>
__global__ void __launch_bounds__(kThreads)
    spread_kernel(CandidateLists lists, const KeptOf<Real>* kept, const int32_t* kept_count,
                  int64_t first_column, int64_t columns, Matrix dz) {
  __shared__ uint32_t seen[kMostWindow / 32], several[kMostWindow / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  T* out = dz.row<T>(row);
  for (int64_t j = thread; j < columns; j += kThreads) out[j] = from_real<T>(0);
  for (int64_t j = thread; j < kMostWindow / 32; j += kThreads) seen[j] = several[j] = 0;
  __syncthreads();
  const KeptOf<Real>* list = kept + lists.begin(row);
  const int count = kept_count[row];
  const auto place_of = [&](int i) {
    const int64_t place = list[i].column - first_column;
    return place >= 0 && place < columns ? static_cast<int>(place) : -1;
  };
  for (int i = thread; i < count; i += kThreads) {
    const int place = place_of(i);
    if (place < 0) continue;
    const uint32_t bit = 1u << (place % 32);
    if ((atomicOr(seen + place / 32, bit) & bit) != 0) atomicOr(several + place / 32, bit);
  }
  __syncthreads();
  for (int i = thread; i < count; i += kThreads) {
    const int place = place_of(i);
    if (place < 0) continue;
    Real sum = list[i].value;
    if ((several[place / 32] >> (place % 32) & 1) != 0) {
      int first = 0;
      while (list[first].column != list[i].column) ++first;
      if (first < i) continue;
      for (int k = i + 1; k < count; ++k) {
        if (list[k].column == list[i].column) sum += list[k].value;
      }
    }
    out[place] = from_real<T>(sum);
  }
}

}  // namespace

template <class Real>
void launch_pick_products(const CandidateLists& lists, const int32_t* column, int64_t first_row, int64_t rows,
                          const ConstMatrix& products, Real* picked, const Queue& queue) {
  queue.launch("pick_products", pick_products_kernel<Real>, static_cast<unsigned>(rows), kThreads, 0, lists,
               column, first_row, products, picked);
}

template <class Real>
void launch_spread(const CandidateLists& lists, const CandidatesArenaOf<Real>& arena, int64_t first_column,
                   int64_t columns, const Matrix& dz, const Queue& queue) {
  for_dtype<Real>(dz.dtype, [&](auto element) {
    queue.launch("spread_candidates", spread_kernel<decltype(element)>, static_cast<unsigned>(lists.rows),
                 kThreads, 0, lists, arena.kept, arena.kept_count, first_column, columns, dz);
  });
}

#define LOGITLESS_INSTANTIATE(Real)                                                                    \
  template void launch_pick_products(const CandidateLists&, const int32_t*, int64_t, int64_t,          \
                                     const ConstMatrix&, Real*, const Queue&);                         \
  template void launch_spread(const CandidateLists&, const CandidatesArenaOf<Real>&, int64_t, int64_t, \
                              const Matrix&, const Queue&);
LOGITLESS_INSTANTIATE(float)
LOGITLESS_INSTANTIATE(double)
#undef LOGITLESS_INSTANTIATE

}  // namespace logitless::cuda
