#pragma once
#include <cmath>
#include <cstdint>

#include "core/host_device.h"

// Thinned gradients: which elements of the softmax are kept, and at what weight. What every backend shares.
//
// A row's elements are first drawn with q_ij = exp(z_ij - guess_i), before lse_i is known: each with
// probability min(1, q / threshold), a systematic draw over some columns at a time. Any guess made without
// the seed gives unbiased gradients; a guess of at most lse (q >= p) keeps every p >= threshold for certain.
// When lse is known, elements whose weight p / min(1, q / threshold) is below the threshold are drawn once
// more, independently: as if the guess had been lse all along, an element p < threshold is kept with
// probability p / threshold at the weight threshold.
namespace headroom {

// 32 random bits, the same for the same arguments. row: the caller's; stream: what is drawn for.
HEADROOM_HD inline uint32_t mix_bits(uint32_t h) {
  h ^= h >> 16;
  h *= 0x7feb352du;
  h ^= h >> 15;
  h *= 0x846ca68bu;
  return h ^ h >> 16;
}

HEADROOM_HD inline uint32_t draw_row_bits(uint64_t seed, uint32_t row) {
  return mix_bits(static_cast<uint32_t>(seed) ^ row * 0x9e3779b1u);
}

HEADROOM_HD inline uint32_t draw_stream_bits(uint32_t row_bits, uint64_t seed, uint32_t stream) {
  return mix_bits(row_bits + stream * 0x85ebca77u + static_cast<uint32_t>(seed >> 32));
}

HEADROOM_HD inline uint32_t draw_bits(uint64_t seed, uint32_t row, uint32_t stream) {
  return draw_stream_bits(draw_row_bits(seed, row), seed, stream);
}

// In (0, 1).
HEADROOM_HD inline float draw_uniform(uint32_t bits) {
  return (static_cast<float>(bits >> 8) + 0.5f) * 0x1p-24f;
}

// Streams are columns for the second draw; the first one's begin past them.
inline constexpr uint32_t kFirstDrawStream = 1u << 31;

// A first draw may keep all q >= certain_share * threshold for certain: then every p >= threshold is kept
// whenever the guess is at most lse - log(certain_share), which leaves an estimate of lse room to err.
//
// The weight of an element that the first draw kept, which stands for p in dz: 0 if the second draw leaves it
// out. p_over_q = exp(guess - lse); uniform in (0, 1) decides.
HEADROOM_HD inline float thinned_weight(float p, float p_over_q, float threshold, float uniform,
                                        float certain_share = 1) {
  const float drawn = threshold * p_over_q;
  const float weight = p >= certain_share * drawn ? p : drawn;
  if (!(weight < threshold)) return weight;
  return uniform * threshold < weight ? threshold : 0;
}

}  // namespace headroom
