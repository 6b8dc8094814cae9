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
// Groups of 16 columns have the least of their E_j in common: m = -log(1 - v) / 16 is the least of 16
// independent exponential numbers. One of the columns, each as likely, has E_j = m. All others have
// E_j = m - log(1 - v_j), because an exponential number beyond m is again an exponential number. So m alone
// rules out most groups.
//
// v and v_j have 64 bits of a counter-based generator. They depend on the seed, the row, the number of the
// sample and the group or the global column alone. So those of a row are distinct and at least 2^-65, and a
// probability is off by at most 2^-64. log E_j is rounded to float32, and so is a key, as its logit is.
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

inline constexpr uint32_t kSampleStep = 0x9e3779b1u;

// The upper 32 bits of v_j, or of v with the key of groups. They differ for all counters. Kernels make them
// for every group, and compare the upper 23. So the key's second half is an addend of a product, which costs
// nothing, and the lowest bits are mixed least.
LOGITLESS_HD inline uint32_t sample_high_bits(SampleKey key, uint32_t counter) {
  return mix_upper_bits(counter * kSampleStep + key.low, key.high);
}
// The lower ones. For a known key the upper bits determine them, over all keys both are independent.
LOGITLESS_HD inline uint32_t sample_low_bits(SampleKey key, uint32_t high) {
  return mix_bits(high + key.low);
}

// A group has columns 8 k + 2 q and 8 k + 2 q + 1 of 64 columns, k in 0..7: those that a thread of a fused
// engine holds.
inline constexpr uint32_t kSampleGroup = 16;
LOGITLESS_HD inline uint32_t sample_group(uint32_t column) {
  return column >> 6 << 2 | (column >> 1 & 3);
}
LOGITLESS_HD inline uint32_t place_in_group(uint32_t column) {
  return (column >> 3 & 7) << 1 | (column & 1);
}

// The numbers of one group.
struct SampleGroup {
  SampleKey key;  // of groups: the halves of the columns' key change places
  uint32_t high;  // of v

  LOGITLESS_HD SampleGroup(SampleKey of_columns, uint32_t column)
      : key{of_columns.high, of_columns.low}, high(sample_high_bits(key, sample_group(column))) {}
  // The place of the column with the least number.
  LOGITLESS_HD uint32_t first_place() const { return mix_bits(high + key.high) / (1u << 28); }
};

// A v and 1 - v, each to nearly all bits of a double.
struct SampleShare {
  double v, rest;

  LOGITLESS_HD SampleShare(SampleKey key, uint32_t high) {
    uint32_t low = sample_low_bits(key, high);
    const bool is_large = high >> 31 != 0;
    if (is_large) high = ~high, low = ~low;
    const double part = high * 0x1p-32 + (low + 0.5) * 0x1p-64;
    v = is_large ? 1 - part : part;
    rest = is_large ? part : 1 - part;
  }
};

// Returns -log E. As E = -log((1 - v) (1 - v_j)^16) / 16, it takes two logarithms. Double arithmetic makes it
// the same on nearly all machines.
LOGITLESS_HD inline float sample_noise(SampleKey key, uint32_t column) {
  const SampleGroup group(key, column);
  SampleShare share(group.key, group.high);
  if (group.first_place() != place_in_group(column)) {
    SampleShare own(key, sample_high_bits(key, column));
    for (uint32_t power = 1; power < kSampleGroup; power *= 2) {
      own.v *= 2 - own.v;
      own.rest *= own.rest;
    }
    share.v += share.rest * own.v;
    share.rest *= own.rest;
  }
  const double number = share.rest < 0.5 ? -std::log(share.rest) : -std::log1p(-share.v);
  return static_cast<float>(-std::log(number / kSampleGroup));
}

// Lists of ids whose noise is wanted: logitless_sample_noise.
struct NoiseLists {
  int64_t rows = 0, columns = 0, sample = 0;
  bool has_seeds_of_rows = false;
  const int64_t* seed = nullptr;
  const int64_t* row_numbers = nullptr;
  const int64_t* ids = nullptr;
  float* noise = nullptr;

  LOGITLESS_HD SampleKey key(int64_t row) const {
    if (has_seeds_of_rows)
      return sample_key(static_cast<uint64_t>(seed[row]), 0, static_cast<uint64_t>(sample));
    const int64_t number = row_numbers == nullptr ? row : row_numbers[row];
    return sample_key(static_cast<uint64_t>(*seed), static_cast<uint64_t>(number),
                      static_cast<uint64_t>(sample));
  }
  // i: the place of an id among all.
  LOGITLESS_HD void make(int64_t i) const {
    noise[i] = sample_noise(key(i / columns), static_cast<uint32_t>(ids[i]));
  }
};

// The bound that a logit must reach for its key to exceed a known one. As -log(1 - v) >= v, a logit must be
// at least key + log(v / 16 + v_j), without v_j in the group's first place. Both are compared without their
// lower bits, and `least` is below the key by more than all roundings.
//
//   no candidate in a group with logits up to z: sample_share(v) > 1 + 16 exp(z - least)
//   no candidate: (sample_share(v) - 1) / 16 + sample_share(v_j) > 1 + exp(z - least)
LOGITLESS_HD inline float least_of_key(float key) {
  return key - (0.01f + std::fabs(key) * 0x1p-20f);
}
LOGITLESS_HD inline float sample_share(uint32_t high_bits) {  // 1 + v, rounded down
  const uint32_t number = 0x3f800000u | high_bits >> 9;
  float share;
  std::memcpy(&share, &number, sizeof(share));
  return share;
}
// Returns the left side of the latter.
LOGITLESS_HD inline float column_share(const SampleGroup& group, SampleKey key, uint32_t column) {
  const bool is_first = group.first_place() == place_in_group(column);
  const float of_column = is_first ? 1.0f : sample_share(sample_high_bits(key, column));
  return (sample_share(group.high) - 1) * (1.0f / kSampleGroup) + of_column;
}

// Whether a logit's key may exceed the known one of `least`. Logits of -inf exceed nothing.
LOGITLESS_HD inline bool may_win(float z, float least, SampleKey key, uint32_t column) {
  if (z == -std::numeric_limits<float>::infinity()) return false;
  const SampleGroup group(key, column);
  const float ratio = std::exp(z - least);
  if (sample_share(group.high) > 1 + kSampleGroup * ratio) return false;
  return !(column_share(group, key, column) > 1 + ratio);
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
  LOGITLESS_HD bool may_win(float z, uint32_t column) const {
    return logitless::may_win(z, least, key, column);
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
