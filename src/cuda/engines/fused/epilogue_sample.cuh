#pragma once
#include <cfloat>

#include "core/sampling.h"
#include "cuda/engines/fused/epilogue_stats.cuh"

// Row statistics, and samples of the softmax (core/sampling.h). Once a row has a key, few groups of columns
// may exceed it: a group costs its maximum, a hash and one exponential, and only candidates get their keys.
namespace logitless::cuda::fused {

// The elements of a thread in 64 columns: a group, where the tile begins at a multiple of 64.
inline constexpr int kSampledAtOnce = 16;
static_assert(kSampledAtOnce == kSampleGroup);

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

// The groups of a block of elements, whose elements 0 and 1 are neighbouring columns. Only a block that
// begins within the thread's group has several: those of its first and last two columns.
struct BlockGroups {
  uint32_t column;  // of element 0
  SampleKey key;

  __device__ __forceinline__ bool is_one() const { return (column & 57) == 0; }
  __device__ __forceinline__ uint32_t column_at(int i) const { return column + column_of(i); }
  __device__ __forceinline__ SampleGroup at(int i) const { return {key, column_at(i)}; }
  // The least share of all of them.
  __device__ __forceinline__ float share() const {
    float least = sample_share(at(0).high);
    if (!is_one()) {
      for (const int i : {1, kSampledAtOnce - 2, kSampledAtOnce - 1}) {
        least = fminf(least, sample_share(at(i).high));
      }
    }
    return least;
  }
};

// Marks elements that may win, as bits i.
__device__ __forceinline__ uint32_t may_win(const float (&z)[kSampledAtOnce], const BlockGroups& groups,
                                            float shift) {
  uint32_t marked = 0;
  const auto mark = [&](int i, float share) {
    marked |= share > 1.f + ptx::exp2_approx(fmaf(z[i], kLog2E, shift)) ? 0u : 1u << i;
  };
  const SampleGroup group = groups.at(0);
  if (groups.is_one()) {
#pragma unroll
    for (int i = 0; i < kSampledAtOnce; ++i) mark(i, column_share(group, groups.key, groups.column_at(i)));
  } else {
#pragma unroll
    for (int i = 0; i < kSampledAtOnce; ++i) {
      if (ptx::always()) mark(i, column_share(groups.at(i), groups.key, groups.column_at(i)));
    }
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

// Marks the thread's blocks whose groups may win, block b as bit b. own_shift: bound_shift() of the lane's
// own row. column: global one of the thread's first elements.
template <class View>
__device__ __forceinline__ uint32_t blocks_that_may_win(const Accumulators& acc, const View& tile,
                                                        const Samples& samples, int sample, float own_shift,
                                                        uint32_t column) {
  constexpr float kLog2OfGroup = 4.f;
  static_assert(kSampleGroup == 1 << 4);
  uint32_t marked = 0;
#pragma unroll
  for (int r = 0; r < View::kRows; ++r) {
    const int row = tile.row(r);
    const bool live = row < tile.rows();
    const SampleKey key = live ? samples.key[row * samples.count + sample] : SampleKey{};
    const float shift = from_owner(own_shift, r) + kLog2OfGroup;
#pragma unroll
    for (int b = 0; b < kBlocksOfRow; ++b) {
      float z = element(acc, r, b * kSampledAtOnce);
#pragma unroll
      for (int i = 1; i < kSampledAtOnce; ++i) z = ptx::max_nan(z, element(acc, r, b * kSampledAtOnce + i));
      // The compiler shall not keep the groups of other rows, as registers are scarce.
      const BlockGroups groups{ptx::always() ? column + column_of(b * kSampledAtOnce) : 0u, key};
      const float most = 1.f + ptx::exp2_approx(fmaf(z, kLog2E, shift));
      const bool may = live && z != -INFINITY && !(groups.share() > most);
      marked |= may ? 1u << (r * kBlocksOfRow + b) : 0u;
    }
  }
  return marked;
}

// One piece of code serves all blocks of elements with candidates. Code for each of them is several times as
// long as the processor's cache of instructions. A block is looked at again as long as it has elements that
// may win: at first all may, and each key leaves fewer.
template <class View>
__device__ __forceinline__ void take_samples(const Accumulators& acc, const View& tile,
                                             const LogitsProduct& product, const Samples& samples) {
  // The global column of a thread's elements from i on.
  const auto column = [&](int i) {
    return samples.first_column +
           static_cast<uint32_t>(product.column_offset + tile.thread_column() + column_of(i));
  };
#pragma unroll 1
  for (int s = 0; s < static_cast<int>(samples.count); ++s) {
    // Other tiles of the row may raise its best key meanwhile, which an older bound does not harm.
    const int own = tile.own_row();
    float own_shift =
        own < tile.rows()
            ? bound_shift(static_cast<volatile unsigned long long*>(samples.best)[own * samples.count + s])
            : 0.f;
    uint32_t blocks =
        __reduce_or_sync(kWarp, blocks_that_may_win(acc, tile, samples, s, own_shift, column(0)));
    uint32_t left = ~0u;  // elements of the block whose keys are not known
#pragma unroll 1
    while (blocks != 0) {
      const int block = __ffs(static_cast<int>(blocks)) - 1, r = block / kBlocksOfRow;
      float z[kSampledAtOnce];
      copy_block(acc, block, z);
      const int row = tile.row(r);
      const bool live = row < tile.rows();
      const SampleKey key = live ? samples.key[row * samples.count + s] : SampleKey{};
      float shift = from_owner(own_shift, r);
      const BlockGroups groups{column(block % kBlocksOfRow * kSampledAtOnce), key};
      const uint32_t marked = live ? may_win(z, groups, shift) & left : 0;
      left = marked & (marked - 1);
      if (__any_sync(kWarp, marked != 0)) {
        if (marked != 0) {
          const int bit = __ffs(static_cast<int>(marked)) - 1;
          unsigned long long* best = samples.best + (row * samples.count + s);
          shift = fminf(shift, raise_best(z, bit, key, groups.column, best));
        }
        shift = fminf(shift, __shfl_xor_sync(kWarp, shift, 1));
        shift = fminf(shift, __shfl_xor_sync(kWarp, shift, 2));
        if (column_group() == r) own_shift = shift;
        if (__any_sync(kWarp, left != 0)) continue;
      }
      blocks &= blocks - 1;
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
