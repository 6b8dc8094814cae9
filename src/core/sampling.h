#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/host_device.h"
#include "core/sparsification.h"

// Sampling from the softmax of a row without its sum: exponential numbers E_j race, and the column with the
// smallest E_j / exp(z_j) wins with the probability softmax_j. That is the largest key z_j - log E_j. A
// maximum merges over any cut of the vocabulary.
//
// E_j = -log(1 - v_j), where v_j has 64 bits of a counter-based generator. They depend on the seed, the row,
// the number of the sample and the global column alone. So the columns of a row have distinct v_j of at
// least 2^-65, and a probability is off by at most 2^-64. log E_j is rounded to float32, and so is a key, as
// its logit is.
namespace logitless {

// Mixes 64 bits.
LOGITLESS_HD inline uint64_t mix_bits(uint64_t h) {
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9ull;
  h = (h ^ h >> 27) * 0x94d049bb133111ebull;
  return h ^ h >> 31;
}

// The generator's key for one sample of a row.
struct SampleKey {
  uint32_t low = 0, high = 0;
};

// row: the caller's, or 0 if the row has a seed of its own.
LOGITLESS_HD inline SampleKey sample_key(uint64_t seed, uint64_t row, uint64_t sample) {
  constexpr uint64_t kStep = 0x9e3779b97f4a7c15ull;
  const uint64_t bits = mix_bits(mix_bits(mix_bits(seed + kStep) + row + kStep) + sample + kStep);
  return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
}

inline constexpr uint32_t kSampleColumnStep = 0x9e3779b1u;

// The upper 32 bits of v, which differ in all columns. Kernels make them for every element, and compare the
// upper 23. So the key's second half is an addend of a product, which costs nothing, and the lowest bits are
// mixed least.
LOGITLESS_HD inline uint32_t sample_high_bits(SampleKey key, uint32_t column) {
  return mix_upper_bits(column * kSampleColumnStep + key.low, key.high);
}
// The lower ones. For a known key the upper bits determine them, over all keys both are independent.
LOGITLESS_HD inline uint32_t sample_low_bits(SampleKey key, uint32_t high) {
  return mix_bits(high + key.low);
}

// Returns -log E. Double arithmetic makes it the same on nearly all machines.
LOGITLESS_HD inline float sample_noise(SampleKey key, uint32_t column) {
  uint32_t high = sample_high_bits(key, column), low = sample_low_bits(key, high);
  const bool is_large = high >> 31 != 0;  // then 1 - v is exact
  if (is_large) high = ~high, low = ~low;
  const double part = high * 0x1p-32 + (low + 0.5) * 0x1p-64;
  return static_cast<float>(-std::log(is_large ? -std::log(part) : -std::log1p(-part)));
}

// The bound that a logit must reach for its key to exceed a known one. E_j >= v_j, so the logit must be at
// least key + log v_j. v_j is compared without its lower bits, and `least` is below the key by more than all
// roundings.
//
//   no candidate: sample_share(high_bits) > 1 + exp(z - least)
LOGITLESS_HD inline float least_of_key(float key) {
  return key - (0.01f + std::fabs(key) * 0x1p-20f);
}
LOGITLESS_HD inline float sample_share(uint32_t high_bits) {  // 1 + v, rounded down
  const uint32_t number = 0x3f800000u | high_bits >> 9;
  float share;
  std::memcpy(&share, &number, sizeof(share));
  return share;
}

// A key and its column as one number, in the order of is_better(). 0 is below all others.
LOGITLESS_HD inline uint64_t packed_sample(float key, uint32_t column) {
  uint32_t bits;
  key += 0.0f;  // equal zeros
  std::memcpy(&bits, &key, sizeof(bits));
  bits = std::isnan(key) ? ~0u : bits >> 31 != 0 ? ~bits : bits | 1u << 31;
  return uint64_t{bits} << 32 | static_cast<uint32_t>(~column);
}
LOGITLESS_HD inline float key_of_packed(uint64_t packed) {
  const auto ordered = static_cast<uint32_t>(packed >> 32);
  if (packed == 0) return -std::numeric_limits<float>::infinity();
  const uint32_t bits = ordered >> 31 != 0 ? ordered & ~(1u << 31) : ~ordered;
  float key;
  std::memcpy(&key, &bits, sizeof(key));
  return key;
}
LOGITLESS_HD inline uint32_t column_of_packed(uint64_t packed) {
  return ~static_cast<uint32_t>(packed);
}

// A sample of a row as kernels find it, with global columns.
struct SampleRace {
  SampleKey key;
  uint64_t best = 0;  // packed_sample()
  float least = 0;

  LOGITLESS_HD SampleRace(SampleKey of, uint64_t packed) : key(of) { reach(packed); }
  // Logits of -inf win nothing.
  LOGITLESS_HD bool may_win(float z, uint32_t column) const {
    if (z == -std::numeric_limits<float>::infinity()) return false;
    return !(sample_share(sample_high_bits(key, column)) > 1 + std::exp(z - least));
  }
  // Adds a logit, even one that may not win.
  LOGITLESS_HD void add(float z, uint32_t column) {
    const uint64_t packed = packed_sample(z + sample_noise(key, column), column);
    if (packed > best) reach(packed);
  }

 private:
  LOGITLESS_HD void reach(uint64_t packed) {
    best = packed;
    least = least_of_key(key_of_packed(packed));
  }
};

// The words of a row of such bits.
LOGITLESS_HD inline int64_t mask_words(int64_t columns) {
  return (columns + 31) / 32;
}

// Bits of the columns that may be sampled, 32 to a word: the tensor sample_mask. Others have logits of -inf.
struct ColumnMask {
  const int32_t* words = nullptr;  // null: all columns
  int64_t stride = 0;              // words between rows

  LOGITLESS_HD static bool has(const int32_t* of_row, int64_t column) {
    return (static_cast<uint32_t>(of_row[column / 32]) >> column % 32 & 1) != 0;
  }
  LOGITLESS_HD const int32_t* of_row(int64_t row) const { return words + row * stride; }
};

// A sampled id of a row, so far.
template <class T>
struct SampledLogit {
  T key = -std::numeric_limits<T>::infinity();
  T z = 0;
  int64_t id = -1;
};

}  // namespace logitless
