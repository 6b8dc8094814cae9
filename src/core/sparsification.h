#pragma once
#include <cmath>
#include <cstdint>

#include "core/host_device.h"

// Sparsified gradients: which elements of the softmax are kept, and at what weight. What every backend
// shares.
//
// A row's elements are first drawn with q_ij = exp(z_ij - lse_estimate_i), before lse_i is known: each with
// probability min(1, q / threshold), a systematic draw over some columns at a time. Any lse_estimate made
// without the seed gives unbiased gradients; a lse_estimate of at most lse (q >= p) keeps every p >=
// threshold for certain. When lse is known, elements whose weight p / min(1, q / threshold) is below the
// threshold are drawn once more, independently: as if the lse_estimate had been lse all along, an element p <
// threshold is kept with probability p / threshold at the weight threshold. The target is not drawn: its
// gradient is exact.
//
// In a group of ranks there is one draw alone: an element p < threshold is kept while uniform * threshold <
// p, whatever the lse_estimate was. So the same seed keeps the same elements for any cut of the vocabulary,
// and in the float64 reference.
//
// The second draw's uniform belongs to the element (draw_uniform(draw_bits(seed, row, global column))), and
// an element stays while uniform * threshold < weight. Weights fall as lse rises, so what is left out by a
// lower bound of lse would be left out by lse too: a list that fills up early is sparsified by what is known
// of lse by then, and neither how often nor when changes what is left in the end.
namespace logitless {

// 32 random bits, the same for the same arguments. row: the caller's; stream: what is drawn for.
LOGITLESS_HD inline uint32_t mix_bits(uint32_t h) {
  h ^= h >> 16;
  h *= 0x7feb352du;
  h ^= h >> 15;
  h *= 0x846ca68bu;
  return h ^ h >> 16;
}

LOGITLESS_HD inline uint32_t draw_row_bits(uint64_t seed, uint32_t row) {
  return mix_bits(static_cast<uint32_t>(seed) ^ row * 0x9e3779b1u);
}

LOGITLESS_HD inline uint32_t draw_stream_bits(uint32_t row_bits, uint64_t seed, uint32_t stream) {
  return mix_bits(row_bits + stream * 0x85ebca77u + static_cast<uint32_t>(seed >> 32));
}

LOGITLESS_HD inline uint32_t draw_bits(uint64_t seed, uint32_t row, uint32_t stream) {
  return draw_stream_bits(draw_row_bits(seed, row), seed, stream);
}

// In (0, 1), both ends excluded: 24 bits and a half would round to 1.
LOGITLESS_HD inline float draw_uniform(uint32_t bits) {
  return (static_cast<float>(bits >> 9) + 0.5f) * 0x1p-23f;
}

// Streams are global columns for the second draw; the first one's begin past them.
inline constexpr uint32_t kFirstDrawStream = 1u << 31;

// The weight of an element of weight p / min(1, q / threshold) after the second draw: 0 if that leaves it
// out. uniform in (0, 1) decides. NaN stays NaN.
LOGITLESS_HD inline float second_draw(float weight, float threshold, float uniform) {
  if (!(weight < threshold)) return weight;
  return uniform * threshold < weight ? threshold : 0;
}

// The same from p and p_over_q = exp(lse_estimate - lse).
LOGITLESS_HD inline float sparsified_weight(float p, float p_over_q, float threshold, float uniform) {
  const float drawn = threshold * p_over_q;
  return second_draw(p > drawn ? p : drawn, threshold, uniform);
}

// How many elements a row can have after both draws, its target aside. Those of p >= threshold and the
// expectation of the others are at most 1 / threshold together. With a systematic first draw over any sets of
// columns and an independent second one the number of the others exceeds its mean m by t with a probability
// of at most exp(-t^2 / (2 (m + t / 3))) (Chernoff: the generating function of a systematic draw's count,
// which is one of two neighboring integers, is below that of a Poisson variable of the same mean, and an
// independent draw keeps it there). t = sqrt(128 / threshold) + 48 makes that less than exp(-64) = 2e-28.
inline int64_t sparsified_row_capacity(double threshold, int64_t vocab) {
  const double most = 1 / threshold + std::sqrt(128 / threshold) + 48;
  return most < static_cast<double>(vocab) ? static_cast<int64_t>(most) : vocab;
}

// Estimates the variance of a row of dz over its squared norm, from what was kept: an element that is kept
// with the probability p / weight and whose gradient is then weight * factor (weight: the threshold, or more
// where the lse_estimate was above lse) has the variance p (weight - p) factor^2 as if drawn on its own
// (systematic draws have less), estimated by weight * (weight - p) factor^2 where it is kept; the exact
// square p^2 factor^2 by weight * p factor^2. Label smoothing's dense part of dz is not counted.
template <class T>
struct DrawVariance {
  T variance = 0, square = 0;

  LOGITLESS_HD void add_exact(T d) { square += d * d; }
  LOGITLESS_HD void add_drawn(T p, T factor, T weight) {
    variance += weight * (weight - p) * factor * factor;
    square += weight * p * factor * factor;
  }
  LOGITLESS_HD T relative() const { return variance == 0 ? T(0) : variance / square; }
};

}  // namespace logitless
