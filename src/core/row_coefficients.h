#pragma once
#include <type_traits>

#include "core/host_device.h"
#include "core/problem.h"
#include "core/row_stats.h"

namespace logitless {

// The scalars of a Problem that the losses depend on, in the type of the computation.
template <class T>
struct LossParams {
  T label_smoothing = 0;
  T z_loss = 0;
  T class_weight_sum = 0;  // sum_j w_j over the whole vocabulary (V_total without class weights)
  T vocab_total = 0;
};

inline LossParams<double> loss_params(const Problem& problem, double class_weight_sum = 0) {
  return {problem.label_smoothing, problem.z_loss, class_weight_sum,
          static_cast<double>(problem.vocab_total)};
}

// The weights of one row that is not ignored.
template <class T>
struct RowWeights {
  T token = 1;       // token_weight_i
  T target = 1;      // w_y
  T target_sum = 1;  // sum_k q_k of a row's targets
};

template <class T>
struct RowLoss {
  T loss = 0;  // loss of the row, before the reduction
#define LOGITLESS_MEMBER(name, ...) T name = 0;
  LOGITLESS_ROW_OUTPUTS(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
};

// Computes loss_i of logitless.h and the row's other outputs from merged statistics of the whole vocabulary.
// target: a global id. The smoothing term sum_j w_j (lse - z_j) also uses differences from the maximum.
template <class T>
LOGITLESS_HD inline RowLoss<T> row_loss(const LossParams<T>& params, const RowWeights<T>& weights,
                                        const RowStats<T>& stats, int64_t target) {
  RowLoss<T> out;
  const bool is_nan = stats.max == std::numeric_limits<T>::infinity();
  const T max = is_nan ? std::numeric_limits<T>::quiet_NaN() : stats.max;
  const T log_sum = is_nan ? max : std::log(stats.sum_exp);
  const T q = weights.target_sum;
#define LOGITLESS_SET_OUTPUT(name, formula) out.name = formula;
  LOGITLESS_ROW_OUTPUTS(LOGITLESS_SET_OUTPUT)
#undef LOGITLESS_SET_OUTPUT
  T loss = (1 - params.label_smoothing) * weights.target * out.nll;
  if (params.label_smoothing > 0) {
    loss +=
        params.label_smoothing / params.vocab_total * (params.class_weight_sum * log_sum - stats.weighted);
  }
  if (params.z_loss != 0) loss += params.z_loss * out.lse * out.lse;
  out.loss = weights.token * loss;
  return out;
}

// dL/dz_ij = p_ij (a + b log p_ij) + c w_j - g q_ij, where log p_ij = z_ij - lse_i. q_ij is [j = y] or, with
// several targets, the sum of the weights of the targets that are j. Kernels of the backward pass know
// nothing else of the loss.
template <class T>
struct RowCoefficients {
  T a = 0, b = 0, c = 0, g = 0;
};

template <class T>
LOGITLESS_HD inline RowCoefficients<T> scaled(const RowCoefficients<T>& k, T factor) {
  return {k.a * factor, k.b * factor, k.c * factor, k.g * factor};
}

// Returns 1 / T of a row, a factor of its logits and of its coefficients (for gradients of the products). If
// T or 1 / T is below `least` or no number it returns NaN, which makes the row NaN, as a NaN logit would.
template <class T>
LOGITLESS_HD inline T inverse_temperature(T temperature, T least = std::numeric_limits<T>::min()) {
  const T inverse = 1 / temperature;
  return temperature >= least && inverse >= least ? inverse : std::numeric_limits<T>::quiet_NaN();
}

// Returns the factor a + b log p of a probability. It stays finite for p = 0, where p log p is 0.
template <class T>
LOGITLESS_HD inline T probability_factor(const RowCoefficients<T>& k, T log_p) {
  return k.b == 0 || log_p == -std::numeric_limits<T>::infinity() ? k.a : k.a + k.b * log_p;
}

// Returns one element of dL/dz: the definition for all scalar code. No term is 0 times an infinity. At a
// nearly certain target p - 1 keeps its digits. q: the element's weight as a target, 0 for all others.
template <class T>
LOGITLESS_HD inline T dz_element(const RowCoefficients<T>& k, T log_p, T class_weight,
                                 std::type_identity_t<T> q) {
  T d;
  if (q != 0 && k.b == 0 && k.a == k.g * q) {
    d = k.a * std::expm1(log_p);
  } else {
    const T p = std::exp(log_p);
    d = p == 0 ? T(0) : p * probability_factor(k, log_p);
    if (q != 0) d -= k.g * q;
  }
  return k.c == 0 ? d : d + k.c * class_weight;
}

// Returns the rounding error of a stored lse; 0 if that is no number.
LOGITLESS_HD inline double lse_residual_of(const LogSumExp<double>& lse, double stored) {
  const double residual = (lse.high - stored) + lse.low;
  return std::isfinite(residual) ? residual : 0;
}

// Splits lse into its rounding to T and the rounding error, for saved statistics; `low` may be passed on as
// lse_residual.
template <class T>
LOGITLESS_HD inline LogSumExp<T> split_to(const LogSumExp<double>& lse) {
  const T high = static_cast<T>(lse.value());
  return {high, static_cast<T>(lse_residual_of(lse, static_cast<double>(high)))};
}

// Upstream gradients of one row.
template <class T>
struct RowUpstream {
  T loss = 0;  // gradient of the row's own loss: 1 / divisor for a mean
#define LOGITLESS_MEMBER(name) T name = 0;
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
};

// Sums the derivatives: d nll/dz = (sum_k q_k) p - q_ij, d lse/dz = p, d target_logit/dz = q_ij, d entropy/dz
// = -p (z - m). With m = sum_j p_j z_j = lse - entropy the last one is -p (log p + entropy), which loses no
// digits to an offset that all logits have in common.
template <class T>
LOGITLESS_HD inline RowCoefficients<T> row_coefficients(const LossParams<T>& params,
                                                        const RowWeights<T>& weights,
                                                        const RowUpstream<T>& upstream, T lse, T entropy) {
  const T k = upstream.loss * weights.token;
  const T target = (1 - params.label_smoothing) * weights.target;
  RowCoefficients<T> out;
  out.a = (k * target + upstream.nll) * weights.target_sum + upstream.lse;
  if (params.label_smoothing > 0) {  // without it, weights of classes that are no target may be anything
    const T smooth = params.label_smoothing / params.vocab_total;
    out.a += k * smooth * params.class_weight_sum;
    out.c = -k * smooth;
  }
  if (params.z_loss != 0) out.a += k * 2 * params.z_loss * lse;
  if (upstream.entropy != 0) {
    out.a -= upstream.entropy * entropy;
    out.b = -upstream.entropy;
  }
  out.g = k * target + upstream.nll - upstream.target_logit;
  return out;
}

}  // namespace logitless
