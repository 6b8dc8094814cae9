#pragma once
#include <cmath>
#include <cstdint>

#include "core/host_device.h"

// Sparsified gradients: which elements of the softmax are kept, and at what weight, for all backends.
//
// The first draw comes before lse_i is known. It uses q_ij = exp(z_ij - lse_estimate_i) and keeps each
// element with probability min(1, q / threshold), in a systematic draw over some columns at a time. Any lse
// estimate made without the seed gives unbiased gradients. If it is at most lse, then q >= p, and every
// p >= threshold is kept for certain.
//
// The second draw comes when lse is known. It draws the elements whose weight p / min(1, q / threshold) is
// below the threshold once more, independently. The result is as if the lse estimate had always been lse: an
// element p < threshold is kept with probability p / threshold at the weight threshold. The target is not
// drawn: its gradient is exact.
//
// In a group of ranks there is only one draw: an element p < threshold is kept if uniform * threshold < p,
// for any lse estimate. So the same seed keeps the same elements for any cut of the vocabulary, and in the
// float64 reference.
//
// The second draw's uniform belongs to the element: draw_uniform(draw_bits(seed, row, global column)). The
// element stays while uniform * threshold < weight. Weights fall as lse rises, so an element that a lower
// bound of lse leaves out is left out by lse as well. A list that fills up early is therefore sparsified with
// the lse that is known by then; neither how often nor when this happens changes the final elements.
namespace logitless {

inline constexpr uint32_t kFirstMix = 0x7feb352du, kSecondMix = 0x846ca68bu;

// Mixes 32 bits; the lowest ones of the result are mixed least. addend: added to the first product.
LOGITLESS_HD inline uint32_t mix_upper_bits(uint32_t h, uint32_t addend = 0) {
  h ^= h >> 16;
  h = h * kFirstMix + addend;
  h ^= h >> 15;
  return h * kSecondMix;
}
// Mixes 32 bits.
LOGITLESS_HD inline uint32_t mix_bits(uint32_t h) {
  h = mix_upper_bits(h);
  return h ^ h >> 16;
}

LOGITLESS_HD inline uint32_t draw_row_bits(uint64_t seed, uint32_t row) {
  return mix_bits(static_cast<uint32_t>(seed) ^ row * 0x9e3779b1u);
}

LOGITLESS_HD inline uint32_t draw_stream_bits(uint32_t row_bits, uint64_t seed, uint32_t stream) {
  return mix_bits(row_bits + stream * 0x85ebca77u + static_cast<uint32_t>(seed >> 32));
}

// Returns 32 random bits, the same for the same arguments. row: the caller's; stream: the purpose of the
// draw.
LOGITLESS_HD inline uint32_t draw_bits(uint64_t seed, uint32_t row, uint32_t stream) {
  return draw_stream_bits(draw_row_bits(seed, row), seed, stream);
}

// Returns a number in (0, 1), both ends excluded. It uses 23 bits, as 24 bits and a half would round to 1.
LOGITLESS_HD inline float draw_uniform(uint32_t bits) {
  return (static_cast<float>(bits >> 9) + 0.5f) * 0x1p-23f;
}

// The second draw's streams are global columns; the first draw's begin past them.
inline constexpr uint32_t kFirstDrawStream = 1u << 31;

// Returns the weight after the second draw of an element of weight p / min(1, q / threshold): 0 if it is left
// out. uniform in (0, 1) decides. NaN stays NaN.
LOGITLESS_HD inline float second_draw(float weight, float threshold, float uniform) {
  if (!(weight < threshold)) return weight;
  return uniform * threshold < weight ? threshold : 0;
}

// Returns the weight after the second draw from p and p_over_q = exp(lse_estimate - lse).
LOGITLESS_HD inline float sparsified_weight(float p, float p_over_q, float threshold, float uniform) {
  const float drawn = threshold * p_over_q;
  return second_draw(p > drawn ? p : drawn, threshold, uniform);
}

// Returns the number of elements that a row can have after both draws, without its target. The elements of
// p >= threshold and the expected number of the others are at most 1 / threshold together. The first draw is
// systematic over any sets of columns, the second one independent. So the number of the others exceeds its
// mean m by t with a probability of at most exp(-t^2 / (2 (m + t / 3))) (Chernoff: the generating function of
// a systematic draw's count, which is one of two neighboring integers, is below that of a Poisson variable of
// the same mean, and an independent draw keeps it there). t = sqrt(128 / threshold) + 48 makes that less than
// exp(-64) = 2e-28.
inline int64_t sparsified_row_capacity(double threshold, int64_t vocab) {
  const double most = 1 / threshold + std::sqrt(128 / threshold) + 48;
  return most < static_cast<double>(vocab) ? static_cast<int64_t>(most) : vocab;
}

// Estimates the variance of a row of dz over its squared norm from the kept elements. An element is kept with
// probability p / weight, and its gradient is then weight * factor. The weight is the threshold, or more if
// the lse estimate was above lse. Its variance is p (weight - p) factor^2 as if drawn on its own; systematic
// draws have less. A kept element estimates that by weight * (weight - p) factor^2, and the exact square
// p^2 factor^2 by weight * p factor^2. Label smoothing's dense part of dz is not counted.
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

// A screen (fp8.h): logits z8 of rounded operands choose the elements, for half the product's time or less.
// Both draws above are made from z8 and lse8, its own lse. So an element gets the weight W8 in the place of
// p8 = exp(z8 - lse8), with mean p8, and was kept with the probability p8 / W8. Kept elements and the target
// get their logits z from the operands as they are. With r = exp(z - z8), in units of exp(lse8),
//
//   sum = 1 + sum over kept of W8 (r - 1)       has the mean exp(lse - lse8)
//   weight = W8 r / sum                         stands in the place of p: its mean is p but for the ratio
//
// The variance of `sum` is estimated by its Horvitz-Thompson sum over kept elements, as if each were drawn on
// its own. The logarithm of a random number is on average below that of its mean, by half the log of 1 + its
// relative variance if it is log-normal. That is added to lse.
template <class T>
struct ScreenedSum {
  T largest = 0;  // log of the largest exp(z - lse8) so far, at least 0: the sums are relative to it
  T change = 0, variance = 0, least = 0;

  // probability: of having been kept; log_q = z - lse8; log_q8 = z8 - lse8
  LOGITLESS_HD void add(T probability, T log_q, T log_q8) {
    if (log_q > largest) {
      const T factor = std::exp(largest - log_q);
      change *= factor;
      variance *= factor * factor;
      least *= factor;
      largest = log_q;
    }
    const T q = std::exp(log_q - largest);
    const T by = (q - std::exp(log_q8 - largest)) / probability;
    change += by;
    variance += (1 - probability) * by * by;
    least += q;
  }
  // A sum cannot be below what is known of it, as an estimate may be where 8-bit logits are far off.
  LOGITLESS_HD T sum() const {
    const T estimate = std::exp(-largest) + change;
    return estimate > least ? estimate : least;
  }
  LOGITLESS_HD T relative_variance() const { return variance / (sum() * sum()); }
  // lse - lse8
  LOGITLESS_HD T log_sum() const { return largest + std::log(sum()) + std::log1p(relative_variance()) / 2; }
};

}  // namespace logitless
