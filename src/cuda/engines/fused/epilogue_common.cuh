#pragma once
#include <cstdint>

#include "cuda/engines/fused/kernel_params.cuh"
#include "cuda/engines/fused/ptx/math.cuh"
#include "cuda/engines/fused/tile_view.cuh"
#include "cuda/engines/logits.h"
#include "cuda/rows/logit_offset.h"
#include "cuda/rows/softcap.h"

// Functions that epilogues share.
namespace logitless::cuda::fused {

// exp(from - to) for from <= to. Equal logit offsets, infinities included, give 1.
__device__ __forceinline__ float rebase(float from, float to) {
  return from == to ? 1.f : ptx::exp2_approx((from - to) * kLog2E);
}

// exp2(fma(z, to_exponent, shift)) with shift = -logit_offset * to_exponent is wrong by the rounding of
// shift. The error is a factor, the same for every z, which this undoes. 1 if the logit offset is far,
// infinite or NaN.
__device__ __forceinline__ float shift_correction(float logit_offset, float to_exponent, float shift) {
  const float excess = fmaf(logit_offset, to_exponent, shift);  // exact
  return fabsf(shift) < kFarShift ? ptx::exp2_approx(-excess) : 1.f;
}

// Subtracts far logit offsets from their rows of products (logits / scale), before the plain kernels' loops.
// Returns the remaining logit offset of the own row.
__device__ __forceinline__ float subtract_far_offsets(Accumulators& acc, float own_offset, float scale) {
  const bool own_far = is_far(own_offset, -own_offset * kLog2E);
  if (!__any_sync(kWarp, own_far)) return own_offset;
  const float unscale = 1.f / scale;
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) {
    const float logit_offset = from_owner(own_offset, r);
    if (!from_owner(own_far, r)) continue;
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) {
      float& z = element(acc, r, i);
      // The logit as other kernels see it: rounded before the logit offset is subtracted.
      z = __fsub_rn(__fmul_rn(z, scale), logit_offset) * unscale;
    }
  }
  return own_far ? 0.f : own_offset;
}

// Sets the logits of columns past the window to a value. With -inf they add nothing and are no maximum.
template <class View>
__device__ __forceinline__ void fill_tail(Accumulators& acc, const View& tile, int columns, float value) {
  if (tile.first_column() + kTileColumns <= columns) return;
  const int limit = columns - tile.thread_column();
#pragma unroll
  for (int i = 0; i < kRowElements; ++i) {
    if (column_of(i) < limit) continue;
#pragma unroll
    for (int r = 0; r < kQuadRows; ++r) element(acc, r, i) = value;
  }
}

// Copies the tile's part of a vector over the window's columns to shared memory, for load_column(); 0 past
// the window. The whole warpgroup calls this. From shared memory, an element costs one instruction and no
// register for its address.
template <class View>
__device__ __forceinline__ void stage_columns(const float* vector, const View& tile, int columns) {
  const int thread = ptx::thread_index();
  const int first = tile.first_column();
  const uint32_t staged = tile.vector();
  tile.sync();  // the previous vector is no longer read
  for (int i = thread & 127; i < kTileColumns; i += 128) {
    const int column = first + i;
    const float value = column < columns ? vector[column] : 0.f;
    ptx::store_shared(staged + i * 4, value);
  }
  tile.sync();
}

// The vector's value for the thread's elements i; base: vector_base().
__device__ __forceinline__ float load_column(uint32_t base, int i) {
  return ptx::load_shared_float(base + 4 * column_of(i));
}

template <class View>
__device__ __forceinline__ uint32_t vector_base(const View& tile) {
  return tile.vector() + 4 * first_column_of_thread();
}

// 1 / T of a row of the tile; 1 if the row does not exist.
template <class View>
__device__ __forceinline__ float inverse_temperature_of(const LogitsProduct& product, const View& tile,
                                                        int row) {
  return row < tile.rows() ? product.transform.inverse_temperature[row] : 1.f;
}

// inverse_softcap() of a row's logits, which are divided by its temperature.
template <class Args, class View>
__device__ __forceinline__ float inverse_cap_of(const KernelParams<Args>& params, const View& tile, int row) {
  const LogitsProduct& product = params.product;
  if (product.transform.inverse_temperature == nullptr || product.transform.softcap == 0.f)
    return params.inverse_cap;
  return inverse_softcap(product.transform.softcap * inverse_temperature_of(product, tile, row));
}

// Multiplies products of 8-bit operands by the factors of their rows and columns.
template <class View>
__device__ __forceinline__ void multiply_by_factors(Accumulators& acc, const View& tile,
                                                    const LogitsProduct& product) {
  stage_columns(product.column_factor, tile, static_cast<int>(product.columns));
  const uint32_t base = vector_base(tile);
  // One after the other, as the product of both may overflow.
#pragma unroll
  for (int i = 0; i < kRowElements; ++i) {
    const float of_column = load_column(base, i);
#pragma unroll
    for (int r = 0; r < kQuadRows; ++r) element(acc, r, i) *= of_column;
  }
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) {
    if (!ptx::always()) continue;
    const int row = tile.row(r);
    const float of_row = row < tile.rows() ? product.row_factor[row] : 1.f;
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) element(acc, r, i) *= of_row;
  }
}

// Zeroes the elements of rows that never exist. The compiler then keeps no registers for them.
template <class View>
__device__ __forceinline__ void clear_empty_rows(Accumulators& acc) {
#pragma unroll
  for (int r = View::kRows; r < kQuadRows; ++r) {
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) element(acc, r, i) = 0.f;
  }
}

// Transforms in place: z = t(scale * dot + bias) / T. softcap is cap (1 - 2 / (1 + exp(2 x / cap))), within
// 1e-6 cap. Columns past the window become -inf. kForgets: no register keeps anything from tile to tile.
template <bool kForgets = false, class View>
__device__ __forceinline__ void transform(Accumulators& acc, const View& tile, const LogitsProduct& product) {
  float cap = product.transform.softcap;
  if constexpr (kForgets) ptx::forget(cap);
  const int columns = static_cast<int>(product.columns);
  if (product.transform.bias != nullptr) {
    stage_columns(product.transform.bias, tile, columns);
    const uint32_t base = vector_base(tile);
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) {
      const float bias = load_column(base, i);
#pragma unroll
      for (int r = 0; r < kQuadRows; ++r) {
        float& z = element(acc, r, i);
        z = fmaf(z, product.transform.scale, bias);
      }
    }
  } else {
    for_each(acc, [&](float z) { return z * product.transform.scale; });
  }
  if (cap != 0.f) {
    const float exponent = 2.f * kLog2E / cap;
    for_each_in_blocks(acc, [&](float z) {
      return fmaf(-2.f * cap, ptx::reciprocal_approx(1.f + ptx::exp2_approx(z * exponent)), cap);
    });
  }
  if (product.transform.inverse_temperature != nullptr) {
#pragma unroll
    for (int r = 0; r < kQuadRows; ++r) {
      const float inverse = inverse_temperature_of(product, tile, tile.row(r));
#pragma unroll
      for (int i = 0; i < kRowElements; ++i) element(acc, r, i) *= inverse;
    }
  }
  fill_tail(acc, tile, columns, -INFINITY);
  clear_empty_rows<View>(acc);
}

// Masked columns become -inf. A word of the mask has eight of the thread's elements of a row. Words are read
// when needed: registers are scarce.
template <class View>
__device__ __forceinline__ void apply_mask(Accumulators& acc, const View& tile,
                                           const LogitsProduct& product) {
  if (product.mask.words == nullptr) return;
#pragma unroll
  for (int r = 0; r < View::kRows; ++r) {
    if (!ptx::always()) continue;
    const int row = tile.row(r);
    if (row >= tile.rows()) continue;
    const int first = tile.first_column(), left = static_cast<int>(product.columns) - first;
    const int32_t* words = product.mask_of_row(row) + (static_cast<int>(product.column_offset) + first) / 32;
#pragma unroll
    for (int w = 0; w < kTileColumns / 32; ++w) {
      if (!ptx::always() || 32 * w >= left) continue;
      const uint32_t bits = static_cast<uint32_t>(words[w]) >> first_column_of_thread();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if ((bits >> column_of(i) & 1) == 0) element(acc, r, 8 * w + i) = -INFINITY;
      }
    }
  }
}

// A logit as a factor: finite, so that exp(-inf) * -inf is 0. (A NaN's exp is already NaN.)
__device__ __forceinline__ float as_factor(float z) {
  return fmaxf(z, -1e30f);
}

// The own row's target as a column of the window; far below 0 for kIgnoredRow, whatever the offset.
__device__ __forceinline__ int load_target(const LogitsProduct& product, int row) {
  return product.target[row] - static_cast<int>(product.column_offset);
}

__device__ __forceinline__ bool is_ignored(const LogitsProduct& product, int target) {
  return target == kIgnoredRow - static_cast<int>(product.column_offset);
}

// The own row's target as a column of this tile; -1 if it is elsewhere.
template <class View>
__device__ __forceinline__ int target_in_tile(const View& tile, int target, int columns) {
  const int first = tile.first_column();
  return target >= first && target < columns && target - first < kTileColumns ? target - first : -1;
}

// A quad handles the own row's target as a column relative to each lane's first column. Few tiles have any
// target.
__device__ __forceinline__ bool any_target(int own_target) {
  return __any_sync(kWarp, own_target >= 0);
}

__device__ __forceinline__ int lane_target(int own_target, int r) {
  return from_owner(own_target, r) - first_column_of_thread();
}

// This thread's element of row r in column `target` (lane_target()); 0 if it has none.
__device__ __forceinline__ float element_at(const Accumulators& acc, int r, int target) {
  float z = 0.f;
#pragma unroll
  for (int i = 0; i < kRowElements; ++i) {
    if (target == column_of(i)) z = element(acc, r, i);
  }
  return z;
}

// Writes the logits of targets, multiplied by unit.
template <class View>
__device__ __forceinline__ void store_target_logits(const Accumulators& acc, const View& tile, int own_target,
                                                    float unit, float* target_logit) {
  if (target_logit == nullptr || !any_target(own_target)) return;
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) {
    const int target = lane_target(own_target, r);
    const float z = element_at(acc, r, target);
    if (is_of_thread(target)) target_logit[tile.row(r)] = z * unit;
  }
}

// Subtracts value from this thread's element of row r in column `target`.
__device__ __forceinline__ void subtract_at(Accumulators& acc, int r, int target, float value) {
#pragma unroll
  for (int i = 0; i < kRowElements; ++i) {
    if (target == column_of(i)) element(acc, r, i) -= value;
  }
}

// Clears rows that are ignored or do not exist: they are stored as 0, whatever was computed for them.
__device__ __forceinline__ void clear_dead_rows(Accumulators& acc, bool own_live) {
  if (__all_sync(kWarp, own_live)) return;
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) {
    if (from_owner(own_live, r)) continue;
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) element(acc, r, i) = 0.f;
  }
}

}  // namespace logitless::cuda::fused
