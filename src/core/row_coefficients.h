#pragma once
#include "core/host_device.h"
#include "core/row_stats.h"

namespace headroom {

// The scalars of a Problem that the losses depend on, in the type of the computation.
template <class T>
struct LossParams {
  T label_smoothing = 0;
  T z_loss = 0;
  T class_weight_sum = 0;  // sum_j w_j over the whole vocabulary (V_total without class weights)
  T vocab_total = 0;
};

// What one row's weights are: ignored rows never come here.
template <class T>
struct RowWeights {
  T token = 1;   // token_weight_i
  T target = 1;  // w_y
};

template <class T>
struct RowLoss {
  T loss = 0;  // of the row, before the reduction
  T nll = 0;
  T lse = 0;
  T entropy = 0;
};

// loss_i of Problem's comment, from merged statistics of the whole vocabulary.
// The smoothing term is sum_j w_j (lse - z_j) = class_weight_sum * lse - weighted_logit_sum.
template <class T>
HEADROOM_HD inline RowLoss<T> row_loss(const LossParams<T>& params, const RowWeights<T>& weights,
                                       const RowStats<T>& stats) {
  RowLoss<T> out;
  out.lse = log_sum_exp(stats);
  out.nll = out.lse - stats.target_logit;
  out.entropy = out.lse - stats.sum_exp_logit / stats.sum_exp;
  T loss = (1 - params.label_smoothing) * weights.target * out.nll;
  if (params.label_smoothing > 0) {
    loss += params.label_smoothing / params.vocab_total *
            (params.class_weight_sum * out.lse - stats.weighted_logit_sum);
  }
  if (params.z_loss != 0) loss += params.z_loss * out.lse * out.lse;
  out.loss = weights.token * loss;
  return out;
}

// dL/dz_ij = p_ij (a + b z_ij) + c w_j - g [j = y]. Kernels of the backward pass know nothing else.
template <class T>
struct RowCoefficients {
  T a = 0, b = 0, c = 0, g = 0;
};

// Upstream gradients of one row.
template <class T>
struct RowUpstream {
  T loss = 0;  // of the row's own loss: 1 / divisor for a mean
  T nll = 0;
  T lse = 0;
  T entropy = 0;
};

// With u the upstream gradients: d nll/dz = p - [j=y], d lse/dz = p,
// d entropy/dz = -p (z - m) with m = sum_j p_j z_j = lse - entropy.
template <class T>
HEADROOM_HD inline RowCoefficients<T> row_coefficients(const LossParams<T>& params,
                                                       const RowWeights<T>& weights,
                                                       const RowUpstream<T>& upstream, T lse, T entropy) {
  const T k = upstream.loss * weights.token;
  const T smooth = params.label_smoothing > 0 ? params.label_smoothing / params.vocab_total : T(0);
  const T target = (1 - params.label_smoothing) * weights.target;
  RowCoefficients<T> out;
  out.a = k * (target + smooth * params.class_weight_sum) + upstream.nll + upstream.lse;
  if (params.z_loss != 0) out.a += k * 2 * params.z_loss * lse;
  if (upstream.entropy != 0) {
    out.a += upstream.entropy * (lse - entropy);
    out.b = -upstream.entropy;
  }
  out.c = -k * smooth;
  out.g = k * target + upstream.nll;
  return out;
}

}  // namespace headroom
