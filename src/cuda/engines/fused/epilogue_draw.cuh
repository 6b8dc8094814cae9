#pragma once
#include "core/sparsification.h"
#include "cuda/engines/fused/epilogue_stats.cuh"

// The first draw of sparsified gradients (core/sparsification.h), and row sums relative to the lse estimate,
// which is the logit offset. A thread draws over its 48 columns of a row of the tile. It keeps each large q.
// It also keeps one of the others whenever their running sum passes the next multiple of the threshold; the
// sum starts at a random share of the threshold.
//
// So nothing is kept unless the plain sum of the 48, which is needed anyway, reaches a large element or the
// rest of that share: one comparison.
namespace logitless::cuda::fused {

inline constexpr int kDrawnAtOnce = 8;
// Partial sums of a row's elements. Those of a plain kernel are of kDrawnAtOnce elements each, so that draws
// may pass over them; general kernels lack the registers.
template <bool kGeneral>
inline constexpr int kSums = kGeneral ? 2 : kRowElements / kDrawnAtOnce;
template <bool kGeneral>
constexpr int sum_of(int element) {
  return kGeneral ? element & 1 : element / kDrawnAtOnce;
}

struct Drawn {
  uint64_t kept = 0;   // bit i: the element is kept
  float expected = 0;  // number of kept ones, times threshold
};

// log2 of q, for a row's logit offset (SplitOffset). The plain kernel has already subtracted far logit
// offsets from its products.
template <bool kGeneral>
__device__ __forceinline__ float exponent_of(float z, SplitOffset logit_offset, float scale) {
  return kGeneral ? fmaf(z - logit_offset.far, kLog2E, logit_offset.shift)
                  : fmaf(z, scale, logit_offset.shift);
}

// may_keep: whether this thread's draw may keep anything. sums: by sum_of(). certain: larger elements are
// kept. start: initial value of the running sum, in (0, threshold).
template <bool kGeneral>
__device__ __forceinline__ Drawn draw_elements(const RowElements& row, bool may_keep,
                                               const float (&sums)[kSums<kGeneral>], SplitOffset logit_offset,
                                               float scale, float threshold, float certain, float start) {
  // To the compiler this is not the shift of the sums, or it would keep their 48 exp logits until here. A few
  // elements at a time are handled, because registers are scarce.
  if (!ptx::always()) logit_offset = SplitOffset{};
  uint32_t low = 0, high = 0;
  float expected = 0.f, running = start;
#pragma unroll
  for (int first = 0; first < kRowElements; first += kDrawnAtOnce) {
    if constexpr (kGeneral) {
      if (!ptx::always()) continue;
    } else {
      const float sum = sums[sum_of<kGeneral>(first)];
      if (!__any_sync(kWarp, may_keep && (running + sum >= threshold || sum >= certain))) {
        running += sum;
        expected += sum;
        continue;
      }
    }
#pragma unroll
    for (int i = first; i < first + kDrawnAtOnce; ++i) {
      const float q = ptx::exp2_approx(exponent_of<kGeneral>(row.at(i), logit_offset, scale));
      const bool large = q >= certain;
      expected += large ? threshold : q;
      running += large ? 0.f : q;
      const bool passed = running >= threshold;
      running -= passed ? threshold : 0.f;
      (i < 32 ? low : high) |= large || passed ? 1u << (i & 31) : 0u;
    }
  }
  return {static_cast<uint64_t>(high) << 32 | low, expected};
}

// Columns of the dense product are drawn like the others, but not kept.
__device__ __forceinline__ uint64_t without_dense(uint64_t kept, const int32_t* role, int first_column) {
  uint64_t left = kept;
  while (left != 0) {
    const int bit = __ffsll(static_cast<long long>(left)) - 1;
    left &= left - 1;
    if (role[first_column + column_of(bit)] >= 0) kept &= ~(uint64_t{1} << bit);
  }
  return kept;
}

// Appends kept elements to the list of row `index`, in any order; reweight.cu orders them. Logits are
// elements times unit, plus what was subtracted.
template <bool kGeneral>
__device__ __forceinline__ void append(const RowElements& row, uint64_t kept, SplitOffset logit_offset,
                                       float scale, float certain, float unit, float subtracted,
                                       const Draws& draws, int64_t index, int first_column) {
  int at = kept != 0 ? atomicAdd(draws.count + index, __popcll(kept)) : 0;
  while (__any_sync(kWarp, kept != 0)) {
    const int bit = __ffsll(static_cast<long long>(kept)) - 1;
    kept &= kept - 1;
    float z = 0.f;
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) z = i == bit ? row.at(i) : z;
    if (bit >= 0 && at < draws.capacity - 1) {
      const bool large = ptx::exp2_approx(exponent_of<kGeneral>(z, logit_offset, scale)) >= certain;
      draws.elements[index * draws.capacity + at] = {2 * (first_column + column_of(bit)) + large,
                                                     fmaf(z, unit, subtracted)};
    }
    ++at;
  }
}

template <bool kGeneral, class View>
__device__ __forceinline__ void draw_epilogue(Accumulators& acc, const View& tile,
                                              const LogitsProduct& product, const DrawArgs& args,
                                              float exponent_scale) {
  const int columns = static_cast<int>(product.columns);
  if constexpr (kGeneral) {
    transform(acc, tile, product);
  } else {
    fill_tail(acc, tile, columns, -INFINITY);
  }
  const PartialStats& stats = args.stats;
  const int row = tile.own_row();
  const int target = row < tile.rows() && product.target != nullptr ? load_target(product, row) : -1;
  const bool live = row < tile.rows() && !is_ignored(product, target);
  const int64_t partial = tile.partial() * stats.stride + row;
  const float logit_offset = live ? args.logit_offset[row] : 0.f;
  const float own_threshold = live ? args.draws.threshold[row] : INFINITY;
  // The caller's row, which owns the list.
  const int own_index = live && args.draws.row != nullptr ? args.draws.row[row] : row;
  // Written by a kernel long before this one, so it may be read again instead of being kept in a register.
  const uint64_t seed = __ldg(args.draws.seed);
  const uint32_t own_bits = draw_row_bits(seed, static_cast<uint32_t>(own_index));
  const float unit = kGeneral ? 1.f : product.transform.scale;
  store_target_logits(acc, tile, target_in_tile(tile, target, columns), unit, args.target_logit);
  const float low =
      live && args.draws.lse_estimate_residual != nullptr ? args.draws.lse_estimate_residual[own_index] : 0.f;
  const SplitOffset own = split_offset(logit_offset, low);
  if constexpr (kGeneral) {
    if (stats.max != nullptr) exp_logits_maximum(acc, tile, product, stats, live, partial);
  } else {
    subtract_far_offsets(acc, logit_offset, product.transform.scale);
  }

  const int first_column = static_cast<int>(product.column_offset) + tile.thread_column();
  float sums[kQuadRows], expected[kQuadRows];
  [[maybe_unused]] float sum_offsets[kQuadRows];  // in units of log(2)
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) {
    const RowElements elements{acc, r};
    const SplitOffset row_offset{kGeneral ? from_owner(own.far, r) : 0.f, from_owner(own.shift, r)};
    float sum[kSums<kGeneral>] = {}, sum_offset[2] = {};
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) {
      const float exponent = exponent_of<kGeneral>(elements.at(i), row_offset, exponent_scale);
      const float q = ptx::exp2_approx(exponent);
      sum[sum_of<kGeneral>(i)] += q;
      if constexpr (kGeneral) sum_offset[i & 1] = fmaf(q, as_factor(exponent), sum_offset[i & 1]);
    }
    if constexpr (kGeneral) {
      sums[r] = sum[0] + sum[1];
    } else {
      sums[r] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + (sum[4] + sum[5]);
    }
    sum_offsets[r] = sum_offset[0] + sum_offset[1];
    expected[r] = sums[r];
    const float threshold = from_owner(own_threshold, r);
    const float certain = threshold * args.draws.certain_share;
    const float uniform = draw_uniform(
        draw_stream_bits(from_owner(own_bits, r), seed,
                         kFirstDrawStream + args.draws.first_stream + static_cast<uint32_t>(first_column)));
    const bool may_keep = sums[r] >= fminf(threshold * uniform, certain) && threshold < INFINITY;
    if (__any_sync(kWarp, may_keep)) {
      const Drawn drawn = draw_elements<kGeneral>(elements, may_keep, sum, row_offset, exponent_scale,
                                                  threshold, certain, threshold * (1.f - uniform));
      if (sums[r] >= certain) expected[r] = drawn.expected;
      const uint64_t kept = may_keep ? without_dense(drawn.kept, args.draws.role, first_column) : 0;
      const int index = from_owner(own_index, r);
      const float subtracted = kGeneral ? 0.f : from_owner(own.far, r);
      if (__any_sync(kWarp, kept != 0)) {
        append<kGeneral>(elements, kept, row_offset, exponent_scale, certain, unit, subtracted, args.draws,
                         index, first_column);
      }
    }
  }
  if (stats.sum == nullptr) return;
  const float tile_sum = sum_to_owner(sums);
  const float tile_expected = sum_to_owner(expected);
  if (live) {
    stats.sum[partial] += tile_sum;
    stats.expected[partial] += tile_expected;
  }
  if constexpr (kGeneral) {
    if (stats.sum_offset != nullptr) {
      const float tile_offset = sum_to_owner(sum_offsets) * kLn2;
      if (live) stats.sum_offset[partial] += tile_offset;
    }
    add_logits(acc, tile, columns, stats, live, partial);
    if (stats.sum_sq != nullptr) {
      // The logit offset is read again instead of being kept in a register.
      const int again = tile.own_row();
      const float lse_estimate = live ? args.logit_offset[again] : 0.f;
      const int index = live && args.draws.row != nullptr ? args.draws.row[again] : again;
      const float rest =
          live && args.draws.lse_estimate_residual != nullptr ? args.draws.lse_estimate_residual[index] : 0.f;
      const float tile_squares = sum_squares(acc, split_offset(lse_estimate, rest));
      if (live) stats.sum_sq[partial] += tile_squares;
    }
  }
}

}  // namespace logitless::cuda::fused
