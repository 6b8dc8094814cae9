#pragma once
#include "cuda/engines/fused/epilogue_sums.cuh"

// Row statistics of a tile, merged into the own row's partial. The partial is read before the work on the
// tile begins, so that the load is done long before it is needed.
namespace logitless::cuda::fused {

// Marks the thread's elements of row r that equal the row's maximum (or are NaN, if that is NaN), as bits i.
// These are masks because 48 predicates would spill.
__device__ __forceinline__ uint64_t maximum_mask(const Accumulators& acc, int r, float row_max) {
  uint32_t low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < kRowElements; ++i) {
    const float z = element(acc, r, i);
    (i < 32 ? low : high) |= ptx::mask_equal(z, row_max) & (1u << (i & 31));
  }
  if (__any_sync(kWarp, row_max != row_max)) {
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) {
      const float z = element(acc, r, i);
      (i < 32 ? low : high) |= ptx::mask_nan(z) & (1u << (i & 31));
    }
  }
  return static_cast<uint64_t>(high) << 32 | low;
}

// The row's lowest column in this tile whose logit is its maximum.
template <class View>
__device__ __forceinline__ int first_maximum(const Accumulators& acc, int r, float row_max,
                                             const View& tile) {
  const int bit = __ffsll(static_cast<long long>(maximum_mask(acc, r, row_max))) - 1;
  const int column = bit < 0 ? 0x7fffffff : tile.thread_column() + column_of(bit);
  return quad_min(column);
}

// The largest of the thread's elements of a row, in two chains of instructions.
struct ThreadMaximum {
  float even, odd;

  __device__ __forceinline__ ThreadMaximum(const Accumulators& acc, int r)
      : even(element(acc, r, 0)), odd(element(acc, r, 1)) {
#pragma unroll
    for (int i = 2; i < kRowElements; i += 2) {
      even = ptx::max_nan(even, element(acc, r, i));
      odd = ptx::max_nan(odd, element(acc, r, i + 1));
    }
  }
  __device__ __forceinline__ float value() const { return ptx::max_nan(even, odd); }
};

__device__ __forceinline__ float row_maximum(const Accumulators& acc, int r) {
  return quad_max(ThreadMaximum(acc, r).value());
}

// Keeps the larger of two maxima with its column. A NaN is larger than all; of equals the first column wins.
__device__ __forceinline__ void merge_argmax(const PartialStats& stats, int64_t partial, float old_max,
                                             float tile_max, int64_t column) {
  const int32_t old = stats.argmax[partial];
  const bool old_nan = old_max != old_max;
  const bool larger = old_nan ? false : !(tile_max <= old_max);  // also when tile_max is NaN
  const bool equal = old_nan ? tile_max != tile_max : tile_max == old_max;
  if (old < 0 || larger || (equal && column < old)) stats.argmax[partial] = static_cast<int32_t>(column);
}

// The own row's sum of w_j z_ij over the tile. Leaves 0 in columns past the window.
template <class View>
__device__ __forceinline__ float weighted_sum(Accumulators& acc, const View& tile, int columns,
                                              const float* class_weight) {
  fill_tail(acc, tile, columns, 0.f);
  float sums[kQuadRows] = {};
  if (class_weight == nullptr) {
    sum_rows(acc, sums);
  } else {
    stage_columns(class_weight, tile, columns);
    const uint32_t base = vector_base(tile);
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) {
      const float weight = load_column(base, i);
#pragma unroll
      for (int r = 0; r < kQuadRows; ++r) {
        sums[r] = fmaf(weight, element(acc, r, i), sums[r]);
      }
    }
  }
  return sum_to_owner(sums);
}

// Recomputes the sums of rows whose maximum is far.
template <bool kGeneral>
__device__ __forceinline__ void sum_far_rows(const Accumulators& acc, const float (&maxima)[kQuadRows],
                                             float to_exponent, float (&sums)[kQuadRows],
                                             float (&sum_offsets)[kQuadRows]) {
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) {
    const float row_max = maxima[r];
    if (!is_far(row_max, -row_max * to_exponent)) continue;
    sums[r] = sum_offsets[r] = 0.f;
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) {
      const float z = element(acc, r, i);
      const float p = ptx::exp2_approx((z - row_max) * to_exponent);
      sums[r] += p;
      if constexpr (kGeneral) sum_offsets[r] = fmaf(p, as_factor(z - row_max), sum_offsets[r]);
    }
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr bool kFewRegisters = true;
#else
inline constexpr bool kFewRegisters = false;
#endif

// kTransforms: the tile has dot products. Otherwise it has final logits, which stay unchanged.
template <bool kGeneral, bool kTransforms = kGeneral, bool kRecomputes = kFewRegisters, class View>
__device__ __forceinline__ void stats_epilogue(Accumulators& acc, const View& tile,
                                               const LogitsProduct& product, const RowSums& args,
                                               float exponent_scale) {
  const int columns = static_cast<int>(product.columns);
  if constexpr (kTransforms) {
    transform(acc, tile, product);
  } else if constexpr (!kGeneral) {
    fill_tail(acc, tile, columns, -INFINITY);
  }
  const PartialStats& stats = args.stats;
  int row = tile.own_row();
  bool live = row < tile.rows();
  int64_t partial = tile.partial() * stats.stride + row;
  float old_max = live ? stats.max[partial] : 0.f;
  float old_sum = live ? stats.sum[partial] : 0.f;
  const int target = live && product.target != nullptr ? load_target(product, row) : -1;

  // Logits are in units of 1 / unit: raw products in the plain kernel, final logits in the general one.
  const float unit = kGeneral ? 1.f : product.transform.scale;
  store_target_logits(acc, tile, target_in_tile(tile, target, columns), unit, args.target_logit);

  const float to_exponent = kGeneral ? kLog2E : exponent_scale;
  float maxima[kQuadRows], sums[kQuadRows];
  [[maybe_unused]] float sum_offsets[kQuadRows] = {};
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) {
    const float row_max = row_maximum(acc, r);
    maxima[r] = row_max;
    // A row of -inf has sum 0: its exponents are -inf - 0, not -inf + inf.
    const float shift = row_max == -INFINITY ? 0.f : -row_max * to_exponent;
    const RowElements z{acc, r};
    float even = 0.f, odd = 0.f;
    if (kGeneral && stats.sum_offset != nullptr) {
#pragma unroll
      for (int i = 0; i < kRowElements; i += 2) {
        const float p = ptx::exp2_approx(fmaf(z.at(i), to_exponent, shift));
        const float q = ptx::exp2_approx(fmaf(z.at(i + 1), to_exponent, shift));
        even += p;
        odd += q;
        sum_offsets[r] = fmaf(p, as_factor(z.at(i) - row_max), sum_offsets[r]);
        sum_offsets[r] = fmaf(q, as_factor(z.at(i + 1) - row_max), sum_offsets[r]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRowElements; i += 2) {
        even += ptx::exp2_approx(fmaf(z.at(i), to_exponent, shift));
        odd += ptx::exp2_approx(fmaf(z.at(i + 1), to_exponent, shift));
      }
    }
    sums[r] = even + odd;
  }

  const float own_max = own_of(maxima);
  const float own_shift = -own_max * to_exponent;
  const float correction = shift_correction(own_max, to_exponent, own_shift);
  if (__any_sync(kWarp, is_far(own_max, own_shift))) {
    sum_far_rows<kGeneral>(acc, maxima, to_exponent, sums, sum_offsets);
  }
  const float tile_max = own_max * unit;
  const float tile_sum = sum_to_owner(sums) * correction;
  // Recomputed, where the compiler has no register free to keep them over the sums.
  if constexpr (kRecomputes) {
    row = tile.own_row();
    live = row < tile.rows();
    partial = tile.partial() * stats.stride + row;
    old_max = live ? stats.max[partial] : 0.f;
    old_sum = live ? stats.sum[partial] : 0.f;
  }
  const float new_max = ptx::max_nan(old_max, tile_max);
  const float old_factor = rebase(old_max, new_max);
  const float tile_factor = rebase(tile_max, new_max);
  if (live) {
    stats.max[partial] = new_max;
    stats.sum[partial] = fmaf(old_sum, old_factor, tile_sum * tile_factor);
  }
  if constexpr (kGeneral) {
    if (stats.sum_offset != nullptr) {
      // Relative to the new maximum; factors of a sum without any element are finite.
      const float tile_offset =
          fmaf(tile_sum, as_factor(tile_max - new_max), sum_to_owner(sum_offsets) * correction);
      if (live) {
        const float old_offset = fmaf(old_sum, as_factor(old_max - new_max), stats.sum_offset[partial]);
        stats.sum_offset[partial] = fmaf(old_offset, old_factor, tile_offset * tile_factor);
      }
    }
    if (stats.argmax != nullptr) {
      int first[kQuadRows];
#pragma unroll
      for (int r = 0; r < kQuadRows; ++r) first[r] = first_maximum(acc, r, maxima[r], tile);
      const int column = own_of(first);
      if (live) merge_argmax(stats, partial, old_max, tile_max, product.column_offset + column);
    }
    if (stats.sum_sq != nullptr) {
      // A row of -inf also has exponents of -inf.
      const float tile_squares = sum_squares(acc, {own_max == -INFINITY ? 0.f : own_max, 0.f});
      if (live) {
        stats.sum_sq[partial] =
            fmaf(stats.sum_sq[partial] * old_factor, old_factor, tile_squares * tile_factor * tile_factor);
      }
    }
    add_logits(acc, tile, columns, stats, live, partial);
    if (stats.weighted != nullptr) {
      const float tile_weighted = weighted_sum(acc, tile, columns, args.class_weight);
      if (live) stats.weighted[partial] += tile_weighted;
    }
  }
}

}  // namespace logitless::cuda::fused
