// Rows of two heads with given products: divergences, and gradients of the student's logits. Both kernels
// should be bound by memory: a thread has 8 columns of both heads in flight at once.
#include <algorithm>

#include "cuda/rows/device_rows.cuh"
#include "cuda/rows/divergence_head.cuh"

namespace logitless::cuda {
namespace {

constexpr int kValueThreads = 384, kGradientThreads = 256;
// Minimum blocks of a multiprocessor. These leave 80 and 64 registers for a thread, without spills on any
// target. Kernels in double take the registers that they need.
template <class T>
constexpr int kValueBlocks = std::is_same_v<T, float> ? 2 : 1;
template <class T>
constexpr int kGradientBlocks = std::is_same_v<T, float> ? 4 : 1;
constexpr int64_t kGradientTurns = 4;       // minimum turns of a block over the columns of a row
constexpr int64_t kMostColumnBlocks = 512;  // a longer row takes more turns of these blocks

// Joins a block's values, the same in all threads and in the same order every time.
template <class T, class Join>
__device__ T joined_over_block(T value, Join join) {
  constexpr int kWarps = kValueThreads / 32;
  __shared__ T of_warps[kWarps];
  for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(~0u, value, step));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  T all = of_warps[0];
  for (int i = 1; i < kWarps; ++i) all = join(all, of_warps[i]);
  __syncthreads();
  return all;
}

__device__ double sum_over_block(double value) {
  return joined_over_block(value, [](double a, double b) { return a + b; });
}

// Sums of exp(z - max), and of these times z - max, of a part of a row, in LogBase's base. -inf adds nothing;
// a NaN, or an infinite maximum, leaves NaN in the sums.
template <class T>
class LogSums {
 public:
  T max = -std::numeric_limits<T>::max();

  // z: over `factor`. The sums change their maximum at most once for all of them.
  template <int kCount>
  __device__ void add(const T (&z)[kCount], T factor) {
    T high = max;
#pragma unroll
    for (int k = 0; k < kCount; ++k) high = ::max(high, z[k]);
    move_to(high, factor);
    T exp = 0, offset = 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const T below = (z[k] - max) * factor, e = LogBase<T>::exp(below);
      exp += e;
      offset = std::fma(e, ::max(below, kFar), offset);
    }
    exp_ += exp;
    offset_ += offset;
  }

  // Joins the sums of the whole row, in every thread.
  __device__ void join_over_block(T factor) {
    move_to(joined_over_block(max, [](T a, T b) { return ::max(a, b); }), factor);
    exp_logits = sum_over_block(static_cast<double>(exp_));
    offsets = sum_over_block(static_cast<double>(offset_));
  }

  double exp_logits = 0, offsets = 0;  // valid after join_over_block()

 private:
  static constexpr T kFar = -2000;  // exp() of this is 0, also in double

  __device__ void move_to(T high, T factor) {
    if (!(high > max)) return;
    const T shift = ::max((max - high) * factor, kFar), ratio = LogBase<T>::exp(shift);
    offset_ = ratio * std::fma(exp_, shift, offset_);
    exp_ *= ratio;
    max = high;
  }

  T exp_ = 0, offset_ = 0;
};

// Writes lse and entropy of a row, by thread 0. Returns lse in LogBase's base.
template <class T>
__device__ T store_sums(void* lse, void* entropy, int64_t row, const LogSums<T>& sums,
                        const HeadRow<T>& head) {
  const double log_exp_logits = LogBase<T>::log(sums.exp_logits);
  if (threadIdx.x == 0) {
    store_if<T>(lse, row, static_cast<double>(head.unit()) * sums.max + head.nats() * log_exp_logits);
    store_if<T>(entropy, row, head.nats() * (log_exp_logits - sums.offsets / sums.exp_logits));
  }
  return static_cast<T>(static_cast<double>(head.factor) * sums.max + log_exp_logits);
}

template <bool kIsMixed, class T, int kCount>
__device__ DivergenceTerms<T> sum_of_terms(const Mixture<T>& mixture, const T (&log_p)[kCount],
                                           const T (&log_q)[kCount]) {
  DivergenceTerms<T> sum{0, 0};
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const auto terms = divergence_terms<kIsMixed>(mixture, log_p[k], log_q[k]);
    sum.student += terms.student;
    sum.teacher += terms.teacher;
  }
  return sum;
}

// Returns a stored lse in LogBase's base.
template <class T>
__device__ T stored_log(const void* lse, int64_t row) {
  return static_cast<T>(double{LogBase<T>::kLogE} * static_cast<const T*>(lse)[row]);
}

// One block for each row, with all of its columns. kSums: it makes lse and entropy. kTerms: it makes the sums
// of terms. With both, the second pass over the columns goes backwards: those that the first one read last
// may still be in the L2 cache.
template <class T, bool kSums, bool kTerms>
__global__ void __launch_bounds__(kValueThreads, kValueBlocks<T>)
    divergence_values_kernel(const __grid_constant__ Divergence d) {
  using Columns = TurnColumns<kValueThreads>;
  const int64_t row = blockIdx.x, turns = (d.columns + Columns::kOfBlock - 1) / Columns::kOfBlock;
  const HeadRow<T> student(d.student, row), teacher(d.teacher, row);
  alignas(16) T x[Columns::kCount], y[Columns::kCount];
  T student_log, teacher_log;
  if constexpr (kSums) {
    LogSums<T> of_student, of_teacher;
    for (int64_t turn = 0; turn < turns; ++turn) {
      const Columns columns(turn, d.columns);
      if (!columns.any_exists()) break;
      student.load(columns, x);
      teacher.load(columns, y);
      student.finish(columns, x);
      of_student.add(x, student.factor);
      teacher.finish(columns, y);
      of_teacher.add(y, teacher.factor);
    }
    of_student.join_over_block(student.factor);
    of_teacher.join_over_block(teacher.factor);
    student_log = store_sums(d.student_lse, d.entropy, row, of_student, student);
    teacher_log = store_sums<T>(d.teacher_lse, nullptr, row, of_teacher, teacher);
    if constexpr (!kTerms) return;
  } else {
    student_log = stored_log<T>(d.student_lse, row);
    teacher_log = stored_log<T>(d.teacher_lse, row);
  }
  const Mixture<T> mixture{static_cast<T>(d.beta), static_cast<T>(1 - d.beta)};
  const bool is_mixed = !mixture.is_student() && !mixture.is_teacher();
  T student_sum = 0, teacher_sum = 0;
  for (int64_t turn = turns - 1; turn >= 0; --turn) {
    const Columns columns(turn, d.columns);
    if (!columns.any_exists()) continue;
    student.load(columns, x);
    teacher.load(columns, y);
    student.finish(columns, x);
    teacher.finish(columns, y);
    student.to_log_probs(student_log, x);
    teacher.to_log_probs(teacher_log, y);
    const auto part = is_mixed ? sum_of_terms<true>(mixture, x, y) : sum_of_terms<false>(mixture, x, y);
    student_sum += part.student;
    teacher_sum += part.teacher;
  }
  const double student_kl = sum_over_block(static_cast<double>(student_sum));
  const double teacher_kl = sum_over_block(static_cast<double>(teacher_sum));
  if (threadIdx.x != 0) return;
  const Mixture<double> wide{d.beta, 1 - d.beta};
  store_if<T>(d.student_kl, row, student_kl);
  store_if<T>(d.divergence, row, divergence_of(wide, student_kl, teacher_kl));
}

template <class T, class G>
__device__ G rounded_to(T value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return from_float<G>(value);
  }
}

template <class G, class Columns, class T>
__device__ __forceinline__ void store(const Columns& columns, const T (&values)[Columns::kCount], G* row) {
  if (columns.all_exist() && is_aligned4(row)) {
#pragma unroll
    for (int k = 0; k < Columns::kCount; k += 4) {
      Vector4<G> piece;
#pragma unroll
      for (int i = 0; i < 4; ++i) piece.x[i] = rounded_to<T, G>(values[k + i]);
      store4(piece, row + columns.at(k));
    }
  } else {
#pragma unroll
    for (int k = 0; k < Columns::kCount; ++k) {
      if (columns.exists(k)) row[columns.at(k)] = rounded_to<T, G>(values[k]);
    }
  }
}

template <bool kIsMixed, class T, int kCount>
__device__ void multiply_by_slopes(const Mixture<T>& mixture, const T (&log_p)[kCount],
                                   const T (&log_q)[kCount], T student_kl, T (&out)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    out[k] *= divergence_slope<kIsMixed>(mixture, log_p[k], log_q[k], student_kl);
  }
}

// blockIdx.x selects the row, blockIdx.y the columns. The thread that writes an element also reads it, so G
// may take the place of the student's products. G: type of the gradient.
template <class T, class G>
__global__ void __launch_bounds__(kGradientThreads, kGradientBlocks<T>)
    divergence_gradient_kernel(const __grid_constant__ Divergence d) {
  using Columns = TurnColumns<kGradientThreads>;
  const int64_t row = blockIdx.x;
  const HeadRow<T> student(d.student, row), teacher(d.teacher, row);
  const Mixture<T> mixture{static_cast<T>(d.beta), static_cast<T>(1 - d.beta)};
  const bool is_mixed = !mixture.is_student() && !mixture.is_teacher();
  const T student_log = stored_log<T>(d.student_lse, row), teacher_log = stored_log<T>(d.teacher_lse, row);
  const T student_kl = static_cast<const T*>(d.student_kl)[row];
  const T grad = static_cast<const T*>(d.grad)[row];
  G* out = static_cast<G*>(d.d_logits) + row * d.d_logits_stride;
  for (int64_t turn = blockIdx.y;; turn += gridDim.y) {
    const Columns columns(turn, d.columns);
    if (!columns.any_exists()) return;
    T slopes[Columns::kCount] = {};
    if (grad != 0) {
      alignas(16) T x[Columns::kCount], y[Columns::kCount];
      student.load(columns, x);
      teacher.load(columns, y);
      student.finish(columns, x);
      teacher.finish(columns, y);
      student.slopes_of(x, grad, slopes);
      student.to_log_probs(student_log, x);
      teacher.to_log_probs(teacher_log, y);
      if (is_mixed) {
        multiply_by_slopes<true>(mixture, x, y, student_kl, slopes);
      } else {
        multiply_by_slopes<false>(mixture, x, y, student_kl, slopes);
      }
    }
    store<G>(columns, slopes, out);
  }
}

template <class Kernel>
void launch_gradient(Kernel kernel, const Divergence& d, const Queue& queue) {
  constexpr int64_t kOfBlock = kGradientTurns * TurnColumns<kGradientThreads>::kOfBlock;
  const int64_t blocks = std::min((d.columns + kOfBlock - 1) / kOfBlock, kMostColumnBlocks);
  queue.launch("divergence", kernel, dim3(static_cast<unsigned>(d.rows), static_cast<unsigned>(blocks)),
               kGradientThreads, 0, d);
}

template <class T>
auto values_kernel(DivergenceStage stage) {
  if (stage == DivergenceStage::kSums) return divergence_values_kernel<T, true, false>;
  if (stage == DivergenceStage::kTerms) return divergence_values_kernel<T, false, true>;
  return divergence_values_kernel<T, true, true>;
}

}  // namespace

void launch_divergence(const Divergence& d, const Queue& queue) {
  const bool is_float64 = d.dtype == DType::kF64;
  if (d.stage != DivergenceStage::kGradient) {
    const auto kernel = is_float64 ? values_kernel<double>(d.stage) : values_kernel<float>(d.stage);
    queue.launch("divergence", kernel, dim3(static_cast<unsigned>(d.rows)), kValueThreads, 0, d);
  } else if (is_float64) {
    launch_gradient(divergence_gradient_kernel<double, double>, d, queue);
  } else {
    for_dtype(d.gradient_dtype, [&](auto element) {
      launch_gradient(divergence_gradient_kernel<float, decltype(element)>, d, queue);
    });
  }
}

}  // namespace logitless::cuda
