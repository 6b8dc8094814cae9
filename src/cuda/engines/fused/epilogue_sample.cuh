#pragma once
#include "core/sampling.h"
#include "cuda/engines/fused/epilogue_stats.cuh"

// Row statistics, and samples of the softmax (core/sampling.h). Once a row has a key, few columns may exceed
// it: an element costs the hash and one exponential, and only candidates get their keys.
namespace logitless::cuda::fused {

inline constexpr int kSampledAtOnce = 16;

// The addend of z * log2(e) in the exponent of a logit's bound.
__device__ __forceinline__ float bound_shift(uint64_t best) {
  return -least_of_key(key_of_packed(best)) * kLog2E;
}

// Marks those of kSampledAtOnce elements that are not -inf. Without a known key they alone may win, as rows
// with few unmasked columns have many tiles of -inf.
__device__ __forceinline__ uint32_t above_infinity(const RowElements& row, int first) {
  uint32_t marked = 0;
#pragma unroll
  for (int i = 0; i < kSampledAtOnce; ++i) marked |= row.at(first + i) == -INFINITY ? 0u : 1u << i;
  return marked;
}

// Raises `best` to the largest packed key of the thread's elements of a row. column: the thread's first one.
__device__ __forceinline__ void take_sample(const RowElements& row, bool live, SampleKey key,
                                            unsigned long long* best, uint32_t column) {
  // Other tiles of the row may raise it meanwhile, which an older value does not harm.
  float shift = live ? bound_shift(*static_cast<volatile unsigned long long*>(best)) : 0.f;
#pragma unroll
  for (int first = 0; first < kRowElements; first += kSampledAtOnce) {
    if (!ptx::always()) continue;  // a few elements at a time: registers are scarce
    uint32_t marked = 0;
#pragma unroll
    for (int i = 0; i < kSampledAtOnce; ++i) {
      const float most = 1.f + ptx::exp2_approx(fmaf(row.at(first + i), kLog2E, shift));
      const uint32_t high = sample_high_bits(key, column + column_of(first + i));
      marked |= sample_share(high) > most ? 0u : 1u << i;
    }
    if (shift == INFINITY) marked &= above_infinity(row, first);  // no key is known yet
    if (!live) marked = 0;
    while (__any_sync(kWarp, marked != 0)) {
      const int bit = __ffs(static_cast<int>(marked)) - 1;
      marked &= marked - 1;
      float z = 0.f;
#pragma unroll
      for (int i = 0; i < kSampledAtOnce; ++i) z = i == bit ? row.at(first + i) : z;
      if (bit < 0) continue;
      const uint32_t at = column + column_of(first + bit);
      const unsigned long long packed = packed_sample(z + sample_noise(key, at), at);
      shift = bound_shift(max(packed, atomicMax(best, packed)));
    }
  }
}

template <class View>
__device__ __forceinline__ void take_samples(const Accumulators& acc, const View& tile,
                                             const LogitsProduct& product, const Samples& samples) {
  for (int s = 0; s < static_cast<int>(samples.count); ++s) {
#pragma unroll
    for (int r = 0; r < kQuadRows; ++r) {
      if (!ptx::always()) continue;  // one row at a time
      const int row = tile.row(r);
      const bool live = row < tile.rows();
      const int64_t at = row * samples.count + s;
      const uint32_t column =
          samples.first_column + static_cast<uint32_t>(product.column_offset + tile.thread_column());
      take_sample(RowElements{acc, r}, live, live ? samples.key[at] : SampleKey{}, samples.best + at, column);
    }
  }
}

// Samples come before the statistics, which leave no registers for whole tiles.
template <class View>
__device__ __forceinline__ void sample_epilogue(Accumulators& acc, const View& tile,
                                                const LogitsProduct& product, const SampleArgs& args,
                                                float exponent_scale) {
  transform(acc, tile, product);
  apply_mask(acc, tile, product);
  take_samples(acc, tile, product, args.samples);
  stats_epilogue</*kGeneral=*/true, /*kTransforms=*/false>(acc, tile, product, args, exponent_scale);
}

}  // namespace logitless::cuda::fused
