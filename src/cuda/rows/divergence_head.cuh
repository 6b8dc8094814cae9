#pragma once
// Logits of a row of one head, as kernels with blocks of kThreads read them.
#include "core/divergence.h"
#include "cuda/rows/divergence_column.cuh"

namespace logitless::cuda {

// Four neighbouring elements, which are loaded and stored at once if they are aligned.
template <class T>
struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Vector4 {
  T x[4];
};

template <class T>
__device__ __forceinline__ bool is_aligned4(const T* row) {
  return reinterpret_cast<uintptr_t>(row) % alignof(Vector4<T>) == 0;
}

// (The compiler would split a plain assignment, because the elements are also stored one by one.)
template <class T>
__device__ __forceinline__ void store4(const Vector4<T>& from, T* to) {
  using Piece = std::conditional_t<sizeof(T) == 2, uint2, uint4>;
  Piece pieces[sizeof from / sizeof(Piece)];
  memcpy(pieces, &from, sizeof from);
#pragma unroll
  for (size_t i = 0; i < sizeof from / sizeof(Piece); ++i)
    __stcg(reinterpret_cast<Piece*>(to) + i, pieces[i]);
}

// A thread's columns in one turn of its block: pieces of 4, which lie side by side over the block's threads.
template <int kThreads>
struct TurnColumns {
  static constexpr int kPieces = 2, kCount = 4 * kPieces;
  static constexpr int64_t kOfBlock = int64_t{kThreads} * kCount;

  int64_t first;
  int64_t end;  // of the row

  __device__ TurnColumns(int64_t turn, int64_t columns)
      : first(turn * kOfBlock + 4 * static_cast<int64_t>(threadIdx.x)), end(columns) {}

  __device__ int64_t at(int k) const { return first + k / 4 * (4 * kThreads) + k % 4; }
  __device__ bool exists(int k) const { return at(k) < end; }
  __device__ bool any_exists() const { return exists(0); }
  __device__ bool all_exist() const { return exists(kCount - 1); }
};

// T: type of products, biases and logits. finish() turns products into scaled logits: `factor` times them are
// logits in LogBase's base, and unit() times them are the actual logits. If the scaled logits are the
// products themselves, finish() leaves them unchanged.
template <class T>
class HeadRow {
 public:
  T factor;

  __device__ HeadRow(const HeadProducts& head, int64_t row)
      : dots_(static_cast<const T*>(head.data) + row * head.stride),
        bias_(static_cast<const T*>(head.bias)),
        scale_(static_cast<T>(head.scale)),
        softcap_(static_cast<T>(head.softcap)),
        bias_scale_(static_cast<T>(head.bias_scale)) {
    takes_products_ = bias_ == nullptr && softcap_ == 0 && scale_ > 0;
    factor = unit() * LogBase<T>::kLogE;
  }

  __device__ T unit() const { return takes_products_ ? scale_ : T(1); }

  // The factor from LogBase's units, as rounded in `factor`, to nats.
  __device__ double nats() const { return static_cast<double>(unit()) / static_cast<double>(factor); }

  // Loads products; no load waits for another. Columns that do not exist become 0.
  template <class Columns>
  __device__ void load(const Columns& columns, T (&x)[Columns::kCount]) const {
    if (columns.all_exist() && is_aligned4(dots_)) {
#pragma unroll
      for (int k = 0; k < Columns::kCount; k += 4) {
        *reinterpret_cast<Vector4<T>*>(x + k) = *reinterpret_cast<const Vector4<T>*>(dots_ + columns.at(k));
      }
    } else {
#pragma unroll
      for (int k = 0; k < Columns::kCount; ++k) x[k] = columns.exists(k) ? dots_[columns.at(k)] : T(0);
    }
  }

  // Turns products into logits over `factor`; columns that do not exist become -inf.
  template <class Columns>
  __device__ void finish(const Columns& columns, T (&x)[Columns::kCount]) const {
    if (!takes_products_) {
#pragma unroll
      for (int k = 0; k < Columns::kCount; ++k) {
        const T bias = bias_ != nullptr && columns.exists(k) ? bias_scale_ * bias_[columns.at(k)] : T(0);
        x[k] = std::fma(scale_, x[k], bias);
      }
      if (softcap_ != 0) {
        const T inverse = 1 / softcap_;
#pragma unroll
        for (int k = 0; k < Columns::kCount; ++k) x[k] = softcap_ * std::tanh(x[k] * inverse);
      }
    }
    if (!columns.all_exist()) {
#pragma unroll
      for (int k = 0; k < Columns::kCount; ++k) {
        if (!columns.exists(k)) x[k] = -std::numeric_limits<T>::infinity();
      }
    }
  }

  // Turns the results of finish() into log-probabilities. log_sum: of the row, in LogBase's base.
  template <int kCount>
  __device__ void to_log_probs(T log_sum, T (&z)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) z[k] = std::fma(factor, z[k], -log_sum);
  }

  // Computes grad dz / d(s x + b) from the results of finish(); 0 if z has reached the softcap.
  template <int kCount>
  __device__ void slopes_of(const T (&z)[kCount], T grad, T (&out)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) out[k] = grad * bias_scale_;
    if (softcap_ == 0) return;
    const T inverse = 1 / softcap_;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const T ratio = z[k] * inverse;
      out[k] *= std::fma(-ratio, ratio, T(1));
    }
  }

 private:
  const T* dots_;
  const T* bias_;
  T scale_, softcap_, bias_scale_;
  bool takes_products_;
};

}  // namespace logitless::cuda
