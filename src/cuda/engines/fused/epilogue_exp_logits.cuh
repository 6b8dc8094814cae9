#pragma once
#include <type_traits>

#include "cuda/engines/fused/epilogue_stats.cuh"

// Exp logits relative to the row's logit offset, in place of the logits, and their row sums. With softcap the
// stored value is the exp times the slope of t, which the gradient needs; the sums are of the plain exp
// logits. Those in float16 are multiplied by their groups' powers of two.
namespace logitless::cuda::fused {

// The maximum of the general kernel's rows, taken before the exp logits replace the logits.
template <class View>
__device__ __forceinline__ void exp_logits_maximum(const Accumulators& acc, const View& tile,
                                                   const LogitsProduct& product, const PartialStats& stats,
                                                   bool live, int64_t partial) {
  float maxima[kQuadRows];
  int first[kQuadRows] = {};
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) {
    maxima[r] = row_maximum(acc, r);
    if (stats.argmax != nullptr) first[r] = first_maximum(acc, r, maxima[r], tile);
  }
  const float tile_max = own_of(maxima);
  const int column = own_of(first);
  if (!live) return;
  const float old_max = stats.max[partial];
  if (stats.argmax != nullptr)
    merge_argmax(stats, partial, old_max, tile_max, product.column_offset + column);
  stats.max[partial] = ptx::max_nan(old_max, tile_max);
}

// Multiplies each row by 2^exponent, and stores the exponent. A row of the tile is a group of columns.
template <class View>
__device__ __forceinline__ void share_exponents(Accumulators& acc, const View& tile,
                                                const Exponents& exponents, bool live) {
  int of_rows[kQuadRows];
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) {
    of_rows[r] = shared_exponent(row_maximum(acc, r));
    const float factor = power_of_two(of_rows[r]);
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) element(acc, r, i) *= factor;
  }
  const int own = own_of(of_rows);
  if (!live) return;
  exponents.data[tile.own_row() * exponents.stride + tile.first_column() / kExponentColumns] =
      static_cast<int8_t>(own);
}

// The work on a tile's elements. Each kind includes those before it. Work that is not wanted would be
// exposed.
enum class ExpLogitsWork { kSums, kOffsets, kCapped, kSquares };

// Elements that the compiler may work on at once, if it must work in pieces.
inline constexpr int kExpLogitsAtOnce = 16;

template <bool kGeneral, DType kType, class View>
__device__ __forceinline__ void exp_logits_epilogue(Accumulators& acc, const View& tile,
                                                    const KernelParams<ExpLogitsArgs>& params) {
  const LogitsProduct& product = params.product;
  const ExpLogitsArgs& args = params.args;
  const int columns = static_cast<int>(product.columns);
  if constexpr (kGeneral) {
    transform(acc, tile, product);
  } else {
    fill_tail(acc, tile, columns, -INFINITY);
  }
  const PartialStats& stats = args.stats;
  const bool needs_logits = product.transform.softcap != 0.f || stats.sum_sq != nullptr;
  const int row = tile.own_row();
  const int target = row < tile.rows() && product.target != nullptr ? load_target(product, row) : -1;
  const bool live = row < tile.rows() && !is_ignored(product, target);
  const int64_t partial = tile.partial() * stats.stride + row;
  const float old_sum = live ? stats.sum[partial] : 0.f;
  float own_offset = live ? args.logit_offset[row] : 0.f;
  store_target_logits(acc, tile, target_in_tile(tile, target, columns),
                      kGeneral ? 1.f : product.transform.scale, args.target_logit);
  if constexpr (kGeneral) {
    if (stats.max != nullptr) exp_logits_maximum(acc, tile, product, stats, live, partial);
    add_logits(acc, tile, columns, stats, live, partial);

  } else {
    own_offset = subtract_far_offsets(acc, own_offset, product.transform.scale);
  }

  const SplitOffset own = split_offset(own_offset);
  float sums[kQuadRows];
  [[maybe_unused]] float sum_offsets[kQuadRows];  // in units of log(2)
  [[maybe_unused]] float sum_squares[kQuadRows] = {};
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) {
    const float shift = from_owner(own.shift, r);
    [[maybe_unused]] const float inverse_cap = kGeneral ? inverse_cap_of(params, tile, tile.row(r)) : 0.f;
    [[maybe_unused]] const float far = kGeneral ? from_owner(own.far, r) : 0.f;
    float sum[2] = {};
    [[maybe_unused]] float sum_offset[2] = {};
    const auto make_exp_logits = [&](auto wanted) {
      constexpr ExpLogitsWork kWork = decltype(wanted)::value;
      constexpr bool kNeedsLogits = kWork >= ExpLogitsWork::kCapped;
#pragma unroll
      for (int first = 0; first < kRowElements; first += kExpLogitsAtOnce) {
        if (kGeneral && View::kInPieces && !ptx::always()) continue;
#pragma unroll
        for (int i = first; i < first + kExpLogitsAtOnce; ++i) {
          float& z = element(acc, r, i);
          const float from_offset = kGeneral ? z - far : z;
          const float exponent = fmaf(from_offset, kGeneral ? kLog2E : params.exponent_scale, shift);
          const float p = ptx::exp2_approx(exponent);
          sum[i & 1] += p;
          if constexpr (kWork >= ExpLogitsWork::kOffsets)
            sum_offset[i & 1] = fmaf(p, as_factor(exponent), sum_offset[i & 1]);
          if constexpr (kWork == ExpLogitsWork::kSquares) sum_squares[r] = fmaf(p, p, sum_squares[r]);
          z = kNeedsLogits ? p * softcap_slope(as_factor(z), inverse_cap) : p;
        }
      }
    };
    using Work = ExpLogitsWork;
    if (!kGeneral || (stats.sum_offset == nullptr && !needs_logits)) {
      make_exp_logits(std::integral_constant<Work, Work::kSums>{});
    } else if constexpr (kGeneral) {
      if (!needs_logits) {
        make_exp_logits(std::integral_constant<Work, Work::kOffsets>{});
      } else if (stats.sum_sq == nullptr) {
        make_exp_logits(std::integral_constant<Work, Work::kCapped>{});
      } else {
        make_exp_logits(std::integral_constant<Work, Work::kSquares>{});
      }
    }
    sums[r] = sum[0] + sum[1];
    sum_offsets[r] = sum_offset[0] + sum_offset[1];
  }
  const float tile_sum = sum_to_owner(sums);
  if (live) stats.sum[partial] = old_sum + tile_sum;
  if constexpr (kGeneral) {
    if (stats.sum_offset != nullptr) {
      const float tile_offset = sum_to_owner(sum_offsets) * kLn2;
      if (live) stats.sum_offset[partial] += tile_offset;
    }
    if (stats.sum_sq != nullptr) {
      const float tile_squares = sum_to_owner(sum_squares);
      if (live) stats.sum_sq[partial] += tile_squares;
    }
  }
  clear_dead_rows(acc, live);
  if constexpr (kType == DType::kF16) {
    if (tile.first_column() < static_cast<int>(args.exp_logits.columns))
      share_exponents(acc, tile, args.exponents, live);
  }
}

// The power of two that stored exp logits of a dtype lack.
constexpr int exponent_of_stored(DType dtype) {
  return dtype == DType::kF16 ? 0 : kKeptExponent;
}

}  // namespace logitless::cuda::fused
