#pragma once
// Divergences of two heads' rows: a backend's inputs, and the arithmetic of one column.
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/dtype.h"
#include "core/host_device.h"

namespace logitless {

// Numbered as logitless_divergence_stage in the C header.
enum class DivergenceStage : int { kValues = 0, kGradient = 1, kSums = 2, kTerms = 3 };

// One head's products and the factors that make logits of them: z = t(scale x + bias_scale bias), with t =
// identity or softcap tanh(. / softcap). The temperature is in all three factors.
struct HeadProducts {
  const void* data = nullptr;  // [rows, columns]
  int64_t stride = 0;
  const void* bias = nullptr;  // [columns], null: none
  double scale = 1;
  double softcap = 0;
  double bias_scale = 1;
};

// logitless_divergence with its strides filled in.
struct Divergence {
  DivergenceStage stage = DivergenceStage::kValues;
  DType dtype = DType::kF32;
  DType gradient_dtype = DType::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  double beta = 0;
  double inverse_temperature = 1;
  HeadProducts student, teacher;
  void* student_lse = nullptr;
  void* teacher_lse = nullptr;
  void* student_kl = nullptr;
  void* divergence = nullptr;
  void* entropy = nullptr;
  const void* grad = nullptr;
  void* d_logits = nullptr;
  int64_t d_logits_stride = 0;
};

// Options of logitless_divergence that validated() turns into factors.
struct DivergenceOptions {
  double temperature = 1;
  double student_scale = 1, student_softcap = 0;
  double teacher_scale = 1, teacher_softcap = 0;
};

// Checks everything, fills in strides, and puts the temperature into the factors. Throws Error.
Divergence validated(Divergence divergence, const DivergenceOptions& options);

// The stages of one row. Values are sums, then terms.
struct DivergenceRow {
  void (*sums)(const Divergence&, int64_t row) = nullptr;
  void (*terms)(const Divergence&, int64_t row) = nullptr;
  void (*gradient)(const Divergence&, int64_t row) = nullptr;

  void run(const Divergence& d, int64_t row) const {
    if (d.stage == DivergenceStage::kGradient) return gradient(d, row);
    if (d.stage != DivergenceStage::kTerms) sums(d, row);
    if (d.stage != DivergenceStage::kSums) terms(d, row);
  }
};

// The mixture m = (1 - beta) p + beta q.
template <class T>
struct Mixture {
  T beta = 0;
  T rest = 1;  // 1 - beta

  LOGITLESS_HD bool is_student() const { return beta == 0; }
  LOGITLESS_HD bool is_teacher() const { return rest == 0; }
};

template <class T>
inline Mixture<T> mixture_of(double beta) {
  return {static_cast<T>(beta), static_cast<T>(1 - beta)};
}

// One column of a row. T may also be a vector, in the CPU backend.
template <class T>
struct DivergenceColumn {
  T p = 0;          // the student's probability
  T log_ratio = 0;  // log(p / m)
  // Terms of KL(p || m) and KL(q || m). To each is added m - p (m - q), whose sum over a row is 0. So a term
  // is never negative, and an error of lse, which is the same in all columns, cancels to first order.
  T student_term = 0;
  T teacher_term = 0;
};

// x log y with 0 log y = 0.
template <class T>
LOGITLESS_HD inline T times_log(T x, T log_y) {
  return x == 0 ? T(0) : x * log_y;
}

// Makes a column from log p and log q. It uses only their difference and the larger of the two. So nothing
// overflows, and log(p / m) is no difference of two large numbers.
template <class T>
LOGITLESS_HD inline DivergenceColumn<T> divergence_column(const Mixture<T>& mixture, T log_p, T log_q) {
  constexpr T kNone = -std::numeric_limits<T>::infinity();
  DivergenceColumn<T> out;
  const T u = log_p == kNone && log_q == kNone ? T(0) : log_q - log_p;
  if (mixture.is_student()) {
    const T q = std::exp(log_q);
    out.p = std::exp(log_p);
    out.teacher_term = times_log(q, u) + (out.p - q);
    return out;
  }
  if (mixture.is_teacher()) {
    out.p = std::exp(log_p);
    out.log_ratio = -u;
    out.student_term = times_log(out.p, -u) + (std::exp(log_q) - out.p);
    return out;
  }
  const bool q_is_larger = u >= 0;
  const T distance = std::fabs(u);
  const T ratio = std::exp(-distance);  // smaller one over larger one
  const T large = std::exp(q_is_larger ? log_q : log_p), small = large * ratio;
  const T large_part = q_is_larger ? mixture.beta : mixture.rest;  // its share of m
  const T small_part = q_is_larger ? mixture.rest : mixture.beta;
  // m over the larger one is 1 + small_part (ratio - 1). large_part + small_part ratio would differ: the
  // rounded parts do not add up to 1, an error of the same sign in all columns.
  const T log_large =
      ratio > T(0.5) ? -std::log1p(small_part * (ratio - 1)) : -std::log(large_part + small_part * ratio);
  const T log_small = log_large - distance;
  const T large_term = times_log(large, log_large), small_term = times_log(small, log_small);
  const T q_minus_p = q_is_larger ? large - small : small - large;
  out.p = q_is_larger ? small : large;
  out.log_ratio = q_is_larger ? log_small : log_large;
  out.student_term = (q_is_larger ? small_term : large_term) + mixture.beta * q_minus_p;
  out.teacher_term = (q_is_larger ? large_term : small_term) - mixture.rest * q_minus_p;
  return out;
}

// Returns D of a row from the sums of its terms.
template <class T>
LOGITLESS_HD inline T divergence_of(const Mixture<T>& mixture, T student_kl, T teacher_kl) {
  if (mixture.is_student()) return teacher_kl;
  if (mixture.is_teacher()) return student_kl;
  return mixture.beta * teacher_kl + mixture.rest * student_kl;
}

// Returns dD / dz of the student. q: the teacher's probability, which only beta = 0 needs.
template <class T>
LOGITLESS_HD inline T divergence_slope(const Mixture<T>& mixture, const DivergenceColumn<T>& column, T q,
                                       T student_kl) {
  if (mixture.is_student()) return column.p - q;
  const T factor = mixture.is_teacher() ? T(1) : mixture.rest;
  return times_log(column.p, factor * (column.log_ratio - student_kl));
}

}  // namespace logitless
