#include "core/status.h"
#include "cuda/rows/vector8.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ void store(T* to, RealOf<T> value, bool accumulate) {
  *to = from_real<T>(accumulate ? to_real(*to) + value : value);
}

// One warp for each of the caller's rows.
template <class T>
__device__ void zero_if_ignored(const StoreHidden& s, const RowTargets& in, int64_t row) {
  if (row >= in.tokens) return;
  const int64_t target = target_of(in, row);
  if (target != in.ignore_index && in_range(in, target)) return;
  T* to = s.to.row<T>(row);
  for (int64_t i = threadIdx.x % 32; i < s.columns; i += 32) to[i] = from_real<T>(0);
}

// The terms of one row.
template <class Operand>
struct RowTerms {
  const Terms& terms;
  float dz[kMostTerms];

  __device__ RowTerms(const Terms& of, int64_t row) : terms(of) {
#pragma unroll
    for (int k = 0; k < kMostTerms; ++k) {
      dz[k] = k < terms.count ? to_float(terms.dz.row<Operand>(row)[k]) : 0.0f;
    }
  }
  // Adds the terms to the sums of columns [i, i + 8).
  __device__ void add_to(Vector8<float>* sums, int64_t i) const {
#pragma unroll
    for (int k = 0; k < kMostTerms; ++k) {
      if (k >= terms.count) break;
      const Vector8<Operand> row = load8<true>(terms.matrix.row<Operand>(k) + i, 8);
#pragma unroll
      for (int e = 0; e < 8; ++e) sums->x[e] = fmaf(dz[k], to_float(row.x[e]), sums->x[e]);
    }
  }
};
template <>
struct RowTerms<void> {
  __device__ RowTerms(const Terms&, int64_t) {}
  template <class Real>
  __device__ void add_to(Vector8<Real>*, int64_t) const {}
};

// One block for each computed row; later blocks clear ignored rows. kAligned: rows of both matrices are
// pieces of 16 bytes; terms require that as well. Operand: type of the terms, void without any.
template <class T, bool kAligned, class Operand>
__global__ void store_d_hidden_kernel(StoreHidden s, RowTargets in, const Scalars* scalars) {
  const int64_t r = blockIdx.x;
  if (r >= s.rows) return zero_if_ignored<T>(s, in, (r - s.rows) * (kThreads / 32) + threadIdx.x / 32);
  if (r >= existing(s.row_count, s.rows)) return;
  using Real = RealOf<T>;
  const float factor = scalars->dz_unscale * (s.factor != nullptr ? s.factor[r] : 1.0f);
  const Real* from = s.from.row<Real>(r);
  const bool smooths = s.smoothing.sum != nullptr;
  const float smoothing = smooths ? s.smoothing.row_factor[r] : 0.0f;
  T* to = s.to.row<T>(s.row_map[r]);
  if constexpr (kAligned) {
    const RowTerms<Operand> terms(s.terms, r);
    for (int64_t i = 8 * threadIdx.x; i < s.columns; i += 8 * kThreads) {
      Vector8<Real> sums = *reinterpret_cast<const Vector8<Real>*>(from + i);
      terms.add_to(&sums, i);
      auto& piece = *reinterpret_cast<Vector8<T>*>(to + i);
      Vector8<T> stored = s.accumulate ? piece : Vector8<T>{};
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const Real smooth = smooths ? smoothing * s.smoothing.sum[i + k] : 0.0f;
        store(&stored.x[k], sums.x[k] * factor + smooth, s.accumulate);
      }
      piece = stored;
    }
  } else {
    for (int64_t i = threadIdx.x; i < s.columns; i += kThreads) {
      const Real smooth = smooths ? smoothing * s.smoothing.sum[i] : 0.0f;
      store(to + i, from[i] * factor + smooth, s.accumulate);
    }
  }
}

template <class T>
__global__ void zero_rows_kernel(Matrix matrix, int64_t columns) {
  T* row = matrix.row<T>(blockIdx.x);
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) row[i] = from_real<T>(0);
}

constexpr int kEach = 4;  // columns of a thread, whose rows begin at multiples of as many elements

// A block sums 32 kEach columns over all rows, 32 rows at a time, always in the same order. With kSmooths
// both parts of dz, which may cancel, are added element by element.
template <class T, bool kSmooths>
__global__ void __launch_bounds__(1024) column_sums_kernel(ColumnSums c) {
  using Real = RealOf<T>;
  struct alignas(kEach * sizeof(T)) Piece {
    T x[kEach];
  };
  __shared__ Real parts[32][32 * kEach + 1];
  const int lane = threadIdx.x % 32, step = threadIdx.x / 32;
  const int64_t first = int64_t{blockIdx.x} * 32 * kEach, mine = first + kEach * lane;
  const int64_t end = existing(c.row_count, c.rows);
  Real sums_of[kEach] = {};
  const auto factor_of = [&](int64_t r) { return c.row_factor != nullptr ? c.row_factor[r] : 1.0f; };
  const auto smoothing_of = [&](int64_t r, int k) {
    return c.c[r] * (c.column_weight != nullptr ? c.column_weight[mine + k] : 1.0f);
  };
  const auto add = [&](const T& x, int64_t r, int k) {
    if constexpr (kSmooths) {
      sums_of[k] += to_real(x) * factor_of(r) + smoothing_of(r, k);
    } else {
      sums_of[k] += to_real(x) * factor_of(r);
    }
  };
  if (mine + kEach <= c.columns) {
#pragma unroll 4
    for (int64_t r = step; r < end; r += 32) {
      const Piece piece = *reinterpret_cast<const Piece*>(c.dz.row<T>(r) + mine);
#pragma unroll
      for (int k = 0; k < kEach; ++k) add(piece.x[k], r, k);
    }
  } else {
    for (int k = 0; mine + k < c.columns; ++k) {
      for (int64_t r = step; r < end; r += 32) add(c.dz.row<T>(r)[mine + k], r, k);
    }
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) parts[step][kEach * lane + k] = sums_of[k];
  __syncthreads();
  const int64_t j = first + threadIdx.x;
  if (threadIdx.x >= 32 * kEach || j >= c.columns) return;
  Real sum = 0;
  for (int i = 0; i < 32; ++i) sum += parts[i][threadIdx.x];
  if (c.factor != nullptr) sum *= *c.factor;
  Real* sums = static_cast<Real*>(c.sums) + j;
  if (c.adds) sum += *sums;
  const Real stored = sum * static_cast<Real>(c.to_factor);
  if (c.to.data == nullptr) {
    *sums = sum;
  } else if constexpr (std::is_same_v<T, double>) {
    store(c.to.row<double>(0) + j, stored, c.accumulate);
  } else if (c.to.dtype == DType::kF32) {
    store(c.to.row<float>(0) + j, stored, c.accumulate);
  } else if (c.to.dtype == DType::kBF16) {
    store(c.to.row<__nv_bfloat16>(0) + j, stored, c.accumulate);
  } else {
    store(c.to.row<__half>(0) + j, stored, c.accumulate);
  }
}

template <class T>
__global__ void store_vector_kernel(const RealOf<T>* from, int64_t count, RealOf<T> factor, T* to,
                                    bool accumulate) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) store(to + i, from[i] * factor, accumulate);
}

}  // namespace

void launch_store_d_hidden(const StoreHidden& s, const RowTargets& in, const Scalars* scalars,
                           const Queue& queue) {
  const auto rows = static_cast<unsigned>(s.rows);
  const bool aligned = is_aligned8(s.from, s.columns) && is_aligned8(s.to, s.columns);
  const unsigned others = s.zeroes_ignored ? blocks_for(in.tokens, kThreads / 32) : 0;
  for_any_dtype(s.to.dtype, [&](auto type) {
    using T = decltype(type);
    auto kernel = aligned ? store_d_hidden_kernel<T, true, void> : store_d_hidden_kernel<T, false, void>;
    if (s.terms.count > 0) {
      if (!aligned) throw Error(Status::kInternal, "d_hidden: tail terms need aligned rows");
      if constexpr (!std::is_same_v<T, double>) {
        kernel = s.terms.dz.dtype == DType::kBF16 ? store_d_hidden_kernel<T, true, __nv_bfloat16>
                                                  : store_d_hidden_kernel<T, true, __half>;
      }
    }
    queue.launch("store_d_hidden", kernel, rows + others, kThreads, 0, s, in, scalars);
  });
}

void launch_zero_rows(const Matrix& matrix, int64_t rows, int64_t columns, const Queue& queue) {
  if (rows == 0) return;
  for_any_dtype(matrix.dtype, [&](auto type) {
    queue.launch("zero_rows", zero_rows_kernel<decltype(type)>, static_cast<unsigned>(rows), kThreads, 0,
                 matrix, columns);
  });
}

void launch_column_sums(const ColumnSums& c, const Queue& queue) {
  for_any_dtype(c.dz.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = c.c != nullptr ? column_sums_kernel<T, true> : column_sums_kernel<T, false>;
    queue.launch("column_sums", kernel, blocks_for(c.columns, 32 * kEach), 1024, 0, c);
  });
}

void launch_store_vector(const void* from, int64_t count, double factor, void* to, DType dtype,
                         bool accumulate, const Queue& queue) {
  for_any_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    queue.launch("store_vector", store_vector_kernel<T>, blocks_for(count, kThreads), kThreads, 0,
                 static_cast<const RealOf<T>*>(from), count, static_cast<RealOf<T>>(factor),
                 static_cast<T*>(to), accumulate);
  });
}

}  // namespace logitless::cuda
