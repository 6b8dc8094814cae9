// Rows of two heads, whose products are there: divergences, and gradients of the student's logits.
#include "core/divergence.h"

#include <algorithm>

#include "cuda/check.h"
#include "cuda/rows/device_rows.cuh"

namespace headroom::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 4;                 // a thread's in one block of the gradient
constexpr int64_t kMostColumnBlocks = 512;  // the rest of a long row is another turn of these

// Row `row` of one head. T: of products, biases and logits.
template <class T>
struct DeviceRow {
  const T* dots;
  const T* bias;
  T scale, softcap, bias_scale;

  __device__ DeviceRow(const HeadProducts& head, int64_t row)
      : dots(static_cast<const T*>(head.data) + row * head.stride),
        bias(static_cast<const T*>(head.bias)),
        scale(static_cast<T>(head.scale)),
        softcap(static_cast<T>(head.softcap)),
        bias_scale(static_cast<T>(head.bias_scale)) {}

  __device__ T operator()(int64_t j) const {
    const T z = bias == nullptr ? scale * dots[j] : std::fma(scale, dots[j], bias_scale * bias[j]);
    return softcap == 0 ? z : softcap * std::tanh(z / softcap);
  }

  // dz / d(s x + b); 0 where z has reached the softcap.
  __device__ T slope(T z) const {
    const T ratio = softcap == 0 ? T(0) : z / softcap;
    return bias_scale * std::fma(-ratio, ratio, T(1));
  }
};

// Sums of exp(z - max), and of these times z - max, of a part of a row.
template <class T>
struct OnlineSums {
  T max, exp, offset;
};

template <class T>
__device__ OnlineSums<T> no_sums() {
  return {-std::numeric_limits<T>::infinity(), 0, 0};
}

// A part without columns, or of -inf alone, adds nothing. A NaN stays one, in the sums.
template <class T>
__device__ OnlineSums<T> merged(const OnlineSums<T>& a, const OnlineSums<T>& b) {
  if (a.exp == 0) return b;
  if (b.exp == 0) return a;
  const bool a_is_high = a.max >= b.max;
  const T shift = a_is_high ? b.max - a.max : a.max - b.max, factor = std::exp(shift);
  const T high_exp = a_is_high ? a.exp : b.exp, low_exp = a_is_high ? b.exp : a.exp;
  const T high_offset = a_is_high ? a.offset : b.offset, low_offset = a_is_high ? b.offset : a.offset;
  return {a_is_high ? a.max : b.max, high_exp + low_exp * factor,
          high_offset + times_log(factor, low_offset + low_exp * shift)};
}

template <class T>
__device__ OnlineSums<T> merged_over_block(OnlineSums<T> mine) {
  __shared__ OnlineSums<T> all[kThreads];
  all[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) all[threadIdx.x] = merged(all[threadIdx.x], all[threadIdx.x + half]);
    __syncthreads();
  }
  const OnlineSums<T> found = all[0];
  __syncthreads();
  return found;
}

template <class T>
__device__ OnlineSums<T> sums_of_row(const DeviceRow<T>& z, int64_t columns) {
  OnlineSums<T> sums = no_sums<T>();
  for (int64_t j = threadIdx.x; j < columns; j += kThreads) {
    const T value = z(j);
    if (value == -std::numeric_limits<T>::infinity()) continue;
    sums = merged(sums, OnlineSums<T>{value, 1, 0});
  }
  return merged_over_block(sums);
}

template <class T>
__device__ T lse_of(const OnlineSums<T>& sums) {
  return static_cast<T>(static_cast<double>(sums.max) + std::log(static_cast<double>(sums.exp)));
}

// A block a row, all of whose columns are there.
template <class T>
__global__ void __launch_bounds__(kThreads) divergence_values_kernel(const __grid_constant__ Divergence d) {
  const int64_t row = blockIdx.x;
  const DeviceRow<T> student(d.student, row), teacher(d.teacher, row);
  const Mixture<T> mixture{static_cast<T>(d.beta), static_cast<T>(1 - d.beta)};
  const OnlineSums<T> sums = sums_of_row(student, d.columns);
  const T student_lse = lse_of(sums), teacher_lse = lse_of(sums_of_row(teacher, d.columns));
  T student_sum = 0, teacher_sum = 0;
  for (int64_t j = threadIdx.x; j < d.columns; j += kThreads) {
    const auto column = divergence_column(mixture, student(j) - student_lse, teacher(j) - teacher_lse);
    student_sum += column.student_term;
    teacher_sum += column.teacher_term;
  }
  const double student_kl = block_sum<kThreads>(static_cast<double>(student_sum));
  const double teacher_kl = block_sum<kThreads>(static_cast<double>(teacher_sum));
  if (threadIdx.x != 0) return;
  const Mixture<double> wide{d.beta, 1 - d.beta};
  put<T>(d.student_lse, row, student_lse);
  put<T>(d.teacher_lse, row, teacher_lse);
  put<T>(d.student_kl, row, student_kl);
  put<T>(d.divergence, row, divergence_of(wide, student_kl, teacher_kl));
  const double exps = sums.exp;
  put<T>(d.entropy, row, std::log(exps) - static_cast<double>(sums.offset) / exps);
}

template <class T, class G>
__device__ G rounded_to(T value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return from_float<G>(value);
  }
}

// Row blockIdx.x, and columns by blockIdx.y. Every element is read by the thread that writes it, so that G
// may take the place of the student's products. G: of the gradient.
template <class T, class G>
__global__ void __launch_bounds__(kThreads) divergence_gradient_kernel(const __grid_constant__ Divergence d) {
  const int64_t row = blockIdx.x;
  const DeviceRow<T> student(d.student, row), teacher(d.teacher, row);
  const Mixture<T> mixture{static_cast<T>(d.beta), static_cast<T>(1 - d.beta)};
  const T student_lse = static_cast<const T*>(d.student_lse)[row];
  const T teacher_lse = static_cast<const T*>(d.teacher_lse)[row];
  const T student_kl = static_cast<const T*>(d.student_kl)[row];
  const T grad = static_cast<const T*>(d.grad)[row];
  G* out = static_cast<G*>(d.d_logits) + row * d.d_logits_stride;
  const int64_t step = int64_t{gridDim.y} * kThreads;
  for (int64_t j = int64_t{blockIdx.y} * kThreads + threadIdx.x; j < d.columns; j += step) {
    T g = 0;
    if (grad != 0) {
      const T z = student(j), log_q = teacher(j) - teacher_lse;
      const auto column = divergence_column(mixture, z - student_lse, log_q);
      const T q = mixture.is_student() ? std::exp(log_q) : T(0);
      g = grad * student.slope(z) * divergence_slope(mixture, column, q, student_kl);
    }
    out[j] = rounded_to<T, G>(g);
  }
}

template <class Kernel>
void launch_gradient(Kernel kernel, const Divergence& d, const Queue& queue) {
  const int64_t blocks = (d.columns + kColumns * kThreads - 1) / (kColumns * kThreads);
  const dim3 grid(static_cast<unsigned>(d.rows), static_cast<unsigned>(std::min(blocks, kMostColumnBlocks)));
  queue.launch(kernel, grid, kThreads, 0, d);
}

}  // namespace

void launch_divergence(const Divergence& d, const Queue& queue) {
  const bool is_float64 = d.dtype == DType::kF64;
  if (d.stage == DivergenceStage::kValues) {
    const auto kernel = is_float64 ? divergence_values_kernel<double> : divergence_values_kernel<float>;
    queue.launch(kernel, dim3(static_cast<unsigned>(d.rows)), kThreads, 0, d);
  } else if (is_float64) {
    launch_gradient(divergence_gradient_kernel<double, double>, d, queue);
  } else {
    for_dtype(d.gradient_dtype, [&](auto element) {
      launch_gradient(divergence_gradient_kernel<float, decltype(element)>, d, queue);
    });
  }
  check_launch("divergence");
}

}  // namespace headroom::cuda
