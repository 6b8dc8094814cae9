#pragma once
// Divergences of one column, as kernels compute them: for float in base 2 and without branches, for double by
// core/divergence.h.
//
// Let L be the larger one of p and q, r L the smaller one, and d = 1 - r. The mixture is m = M L, and l is
// the part of the larger one in it: M = 1 - y and y = (1 - l) d. Let psi(x) = x - 1 - log x, which is never
// negative. Then
//   the larger one's term is L psi(M), and the smaller one's L (l d^2 - r (psi(r) - psi(M))).
// No terms of first order in d are left to cancel.
#include "core/divergence.h"
#include "cuda/rows/exp2.cuh"

namespace logitless::cuda {

// The base of exp logits and logs of a number type.
template <class T>
struct LogBase;

template <>
struct LogBase<float> {
  static constexpr float kLogE = 1.44269502f;  // log2(e)
  static __device__ float exp(float x) { return exp2_approx(x); }
  static __device__ double log(double x) { return std::log2(x); }
};

template <>
struct LogBase<double> {
  static constexpr double kLogE = 1;
  static __device__ double exp(double x) { return std::exp(x); }
  static __device__ double log(double x) { return std::log(x); }
};

// A column's terms of KL(p || m) and KL(q || m), as in DivergenceColumn.
template <class T>
struct DivergenceTerms {
  T student, teacher;
};

// log b - log a; 0 if both are 0.
__device__ __forceinline__ float log_ratio_of(float a, float b) {
  return a == b ? 0.f : b - a;
}

// psi(1 - y) for y in [0, 1/2], as y^2 times a polynomial of relative error 2^-21.
__device__ __forceinline__ float psi_below_one(float y) {
  float sum = 1.07372034f;
  sum = fmaf(sum, y, -0.984498024f);
  sum = fmaf(sum, y, 0.701536953f);
  sum = fmaf(sum, y, 0.0210891049f);
  sum = fmaf(sum, y, 0.219883412f);
  sum = fmaf(sum, y, 0.248694912f);
  sum = fmaf(sum, y, 0.33336547f);
  sum = fmaf(sum, y, 0.499999881f);
  return y * y * sum;
}

// psi(2^-x) for x in [0, 1], as x^2 times a polynomial of relative error 2^-22.
__device__ __forceinline__ float psi_of_exp(float x) {
  float sum = 0.000120564146f;
  sum = fmaf(sum, x, -0.00130513485f);
  sum = fmaf(sum, x, 0.00960814301f);
  sum = fmaf(sum, x, -0.0555028506f);
  sum = fmaf(sum, x, 0.240226477f);
  return x * x * sum;
}

// psi(M), from y = 1 - M and M; M is the more precise one if it is small.
__device__ __forceinline__ float psi_of_mixture(float y, float m) {
  const float near = psi_below_one(y), far = fmaf(-kLn2, log2_approx(m), -y);
  return y <= 0.5f ? near : far;
}

// The terms from log2 p and log2 q. kIsMixed: beta is neither 0 nor 1.
template <bool kIsMixed>
__device__ __forceinline__ DivergenceTerms<float> divergence_terms(const Mixture<float>& mixture, float a,
                                                                   float b) {
  constexpr float kMost = 128;  // anything above is psi(0), which is infinite without a mixture
  const float u = log_ratio_of(a, b), distance = fabsf(u);
  const float large = exp2_approx(fmaxf(a, b)), r = exp2_approx(-distance);
  const bool is_near = distance <= 1;
  const float near_psi = psi_of_exp(distance);
  const float d = is_near ? fmaf(kLn2, distance, -near_psi) : 1 - r;
  const float psi_r = is_near ? near_psi : fmaf(kLn2, distance, -d);
  if constexpr (kIsMixed) {
    const bool q_is_larger = u >= 0;
    const float large_part = q_is_larger ? mixture.beta : mixture.rest;
    const float psi_m = psi_of_mixture(fmaf(-large_part, d, d), fmaf(large_part, d, r));
    const float of_large = large * psi_m;
    const float of_small = large * fmaf(-r, fminf(psi_r, kMost) - psi_m, d * d * large_part);
    return {q_is_larger ? of_small : of_large, q_is_larger ? of_large : of_small};
  } else {
    const float of_large = large == 0 ? 0 : large * psi_r;
    const float of_small = large * fmaf(-r, fminf(psi_r, kMost), d * d);
    const float of_p = u > 0 ? of_small : of_large, of_q = u < 0 ? of_small : of_large;
    return {mixture.is_teacher() ? of_p : 0, mixture.is_student() ? of_q : 0};
  }
}

template <bool kIsMixed>
__device__ inline DivergenceTerms<double> divergence_terms(const Mixture<double>& mixture, double a,
                                                           double b) {
  const auto column = divergence_column(mixture, a, b);
  return {column.student_term, column.teacher_term};
}

// dD / dz of the student, from log2 p and log2 q.
template <bool kIsMixed>
__device__ __forceinline__ float divergence_slope(const Mixture<float>& mixture, float a, float b,
                                                  float student_kl) {
  const float p = exp2_approx(a), u = log_ratio_of(a, b);
  if constexpr (!kIsMixed) {
    const float of_student = p - exp2_approx(b), of_teacher = times_log(p, fmaf(-kLn2, u, -student_kl));
    return mixture.is_student() ? of_student : of_teacher;
  }
  const bool q_is_larger = u >= 0;
  const float r = exp2_approx(-fabsf(u)), d = 1 - r;
  const float large_part = q_is_larger ? mixture.beta : mixture.rest, y = fmaf(-large_part, d, d);
  const float log_large = y + psi_of_mixture(y, fmaf(large_part, d, r));  // of the larger one over m
  const float log_ratio = q_is_larger ? fmaf(-kLn2, u, log_large) : log_large;
  return times_log(p, mixture.rest * (log_ratio - student_kl));
}

template <bool kIsMixed>
__device__ inline double divergence_slope(const Mixture<double>& mixture, double a, double b,
                                          double student_kl) {
  const double q = mixture.is_student() ? std::exp(b) : 0;
  return divergence_slope(mixture, divergence_column(mixture, a, b), q, student_kl);
}

}  // namespace logitless::cuda
