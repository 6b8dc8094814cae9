#pragma once
#include <cfloat>

#include "core/sampling.h"
#include "cuda/engines/fused/epilogue_stats.cuh"

// Row statistics, and samples of the softmax (core/sampling.h). Once a row has a key, few columns may exceed
// it: an element costs the hash and one exponential, and only candidates get their keys.
namespace logitless::cuda::fused {

inline constexpr int kSampledAtOnce = 16;

// The addend of z * log2(e) in the exponent of a logit's bound. Finite with any finite key, so that a logit
// that overflows beside it may win.
__device__ __forceinline__ float bound_shift(uint64_t best) {
  return fmaxf(-least_of_key(key_of_packed(best)) * kLog2E, -FLT_MAX);
}

inline constexpr int kBlocksOfRow = kRowElements / kSampledAtOnce;

// Copies a block of kSampledAtOnce elements. Row r has the blocks from kBlocksOfRow r on. Halves the number
// of possible blocks until there is one.
template <int kFirst = 0, int kCount = kQuadRows* kBlocksOfRow>
__device__ __forceinline__ void copy_block(const Accumulators& acc, int block,
                                           float (&copy)[kSampledAtOnce]) {
  if constexpr (kCount > 1) {
    if (block < kFirst + kCount / 2) {
      copy_block<kFirst, kCount / 2>(acc, block, copy);
    } else {
      copy_block<kFirst + kCount / 2, kCount - kCount / 2>(acc, block, copy);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSampledAtOnce; ++i) {
      copy[i] = element(acc, kFirst / kBlocksOfRow, kFirst % kBlocksOfRow * kSampledAtOnce + i);
    }
  }
}

// Marks elements that may win, as bits i. column: of element 0.
__device__ __forceinline__ uint32_t may_win(const float (&z)[kSampledAtOnce], SampleKey key, float shift,
                                            uint32_t column) {
  uint32_t marked = 0;
#pragma unroll
  for (int i = 0; i < kSampledAtOnce; ++i) {
    const float most = 1.f + ptx::exp2_approx(fmaf(z[i], kLog2E, shift));
    marked |= sample_share(sample_high_bits(key, column + column_of(i))) > most ? 0u : 1u << i;
  }
  if (shift == INFINITY) {  // no key is known yet, as in masked rows with many tiles of -inf
#pragma unroll
    for (int i = 0; i < kSampledAtOnce; ++i) marked &= z[i] == -INFINITY ? ~(1u << i) : ~0u;
  }
  return marked;
}

// Raises the best key of a sample to that of one element, and returns its bound_shift(). z: the block's. Does
// not wait for the best key of other tiles.
__device__ __forceinline__ float raise_best(const float (&z)[kSampledAtOnce], int bit, SampleKey key,
                                            uint32_t column, unsigned long long* best) {
  float logit = 0.f;
#pragma unroll
  for (int i = 0; i < kSampledAtOnce; ++i) logit = i == bit ? z[i] : logit;
  const uint32_t at = column + column_of(bit);
  const unsigned long long packed = packed_sample(logit + sample_noise(key, at), at);
  atomicMax(best, packed);
  return bound_shift(packed);
}

// One piece of code serves all blocks of elements. Code for each of them is several times as long as the
// processor's cache of instructions. A block is looked at again as long as it has elements that may win: at
// first all may, and each key leaves fewer.
template <class View>
__device__ __forceinline__ void take_samples(const Accumulators& acc, const View& tile,
                                             const LogitsProduct& product, const Samples& samples) {
#pragma unroll 1
  for (int s = 0; s < static_cast<int>(samples.count); ++s) {
    // Other tiles of the row may raise its best key meanwhile, which an older bound does not harm.
    const int own = tile.own_row();
    float own_shift =
        own < tile.rows()
            ? bound_shift(static_cast<volatile unsigned long long*>(samples.best)[own * samples.count + s])
            : 0.f;
    uint32_t left = ~0u;  // elements of the block whose keys are not known
#pragma unroll 1
    for (int block = 0; block < View::kRows * kBlocksOfRow;) {
      const int r = block / kBlocksOfRow;
      float z[kSampledAtOnce];
      copy_block(acc, block, z);
      const int row = tile.row(r);
      const bool live = row < tile.rows();
      const SampleKey key = live ? samples.key[row * samples.count + s] : SampleKey{};
      float shift = from_owner(own_shift, r);
      const uint32_t column =
          samples.first_column + static_cast<uint32_t>(product.column_offset + tile.thread_column() +
                                                       column_of(block % kBlocksOfRow * kSampledAtOnce));
      const uint32_t marked = live ? may_win(z, key, shift, column) & left : 0;
      left = marked & (marked - 1);
      if (__any_sync(kWarp, marked != 0)) {
        if (marked != 0) {
          const int bit = __ffs(static_cast<int>(marked)) - 1;
          unsigned long long* best = samples.best + (row * samples.count + s);
          shift = fminf(shift, raise_best(z, bit, key, column, best));
        }
        shift = fminf(shift, __shfl_xor_sync(kWarp, shift, 1));
        shift = fminf(shift, __shfl_xor_sync(kWarp, shift, 2));
        if (column_group() == r) own_shift = shift;
        if (__any_sync(kWarp, left != 0)) continue;
      }
      ++block;
      left = ~0u;
    }
  }
}

// Samples come before the statistics, which leave no registers for whole tiles.
template <class View>
__device__ __forceinline__ void sample_epilogue(Accumulators& acc, const View& tile,
                                                const LogitsProduct& product, const SampleArgs& args,
                                                float exponent_scale) {
  transform</*kForgets=*/true>(acc, tile, product);
  apply_mask(acc, tile, product);
  take_samples(acc, tile, product, args.samples);
  stats_epilogue</*kGeneral=*/true, /*kTransforms=*/false>(acc, tile, product, args, exponent_scale);
}

}  // namespace logitless::cuda::fused
