#pragma once
#include "cuda/engines/fused/epilogue_common.cuh"

// dz in place of the logits: [p (a + b log p) + c w_j - g [j = target]] * t'(z), p = exp(z - lse), times the
// factor.
namespace logitless::cuda::fused {

__device__ __forceinline__ float load_or_zero(const float* vector, int row, bool live) {
  return live && vector != nullptr ? vector[row] : 0.f;
}

// The own row's numbers; those of dz include the factor. Elements use lse without lse_residual (low), which
// goes into a and b: exp(-low) (a - b low + b (z - lse)).
struct OwnCoefficients {
  float lse;
  float a, b, c, g;
  float inverse_cap;  // inverse_softcap() of the row
  int target;         // column of the tile, or -1

  // The numbers of another row of the quad, except g and target.
  __device__ __forceinline__ OwnCoefficients of(int r) const {
    return {from_owner(lse, r),
            from_owner(a, r),
            from_owner(b, r),
            from_owner(c, r),
            0.f,
            from_owner(inverse_cap, r),
            -1};
  }
};

__device__ __forceinline__ void plain_gradient(Accumulators& acc, const OwnCoefficients& own, float scale,
                                               float exponent_scale) {
  const float logit_offset = subtract_far_offsets(acc, own.lse, scale);
  const float own_shift = -logit_offset * kLog2E;
  const float own_a = own.a * shift_correction(logit_offset, kLog2E, own_shift);
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) {
    const float shift = from_owner(own_shift, r);
    const float a = from_owner(own_a, r);
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) {
      float& z = element(acc, r, i);
      z = a * ptx::exp2_approx(fmaf(z, exponent_scale, shift));
    }
  }
  if (!any_target(own.target)) return;
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) subtract_at(acc, r, lane_target(own.target, r), from_owner(own.g, r));
}

// Elements of a row that the compiler may work on at once: each has its logit and its log p.
inline constexpr int kGradientBlock = 8;

// One element; weight: w_j.
__device__ __forceinline__ float general_element(float logit, const OwnCoefficients& row, float weight) {
  // Finite or NaN, so that p log p is 0 if p is 0.
  const float log_p = ptx::max_nan(logit - row.lse, -1e30f);
  const float p = ptx::exp2_approx(log_p * kLog2E);
  return fmaf(p, fmaf(row.b, log_p, row.a), row.c * weight) *
         softcap_slope(as_factor(logit), row.inverse_cap);
}

template <class View>
__device__ __forceinline__ void general_gradient(Accumulators& acc, const OwnCoefficients& own,
                                                 const View& tile, const GradientArgs& args, int columns) {
  const bool targets = any_target(own.target);
  // g t'(z) of row r's target, taken before dz replaces z.
  const auto at_target = [&](int r) {
    return targets ? softcap_slope(as_factor(element_at(acc, r, lane_target(own.target, r))),
                                   from_owner(own.inverse_cap, r)) *
                         from_owner(own.g, r)
                   : 0.f;
  };
  if (args.c == nullptr || args.class_weight == nullptr) {
#pragma unroll
    for (int r = 0; r < kQuadRows; ++r) {
      const float target_term = at_target(r);
      const OwnCoefficients row = own.of(r);
#pragma unroll
      for (int block = 0; block < kRowElements; block += kGradientBlock) {
        if (ptx::always()) {
#pragma unroll
          for (int i = block; i < block + kGradientBlock; ++i) {
            float& z = element(acc, r, i);
            z = general_element(z, row, 1.f);
          }
        }
      }
      if (targets) subtract_at(acc, r, lane_target(own.target, r), target_term);
    }
  } else {
    // Columns are the outer loop: a weight is read once, and the rows' coefficients are fetched from their
    // owners each time.
    float target_terms[kQuadRows];
#pragma unroll
    for (int r = 0; r < kQuadRows; ++r) target_terms[r] = at_target(r);
    stage_columns(args.class_weight, tile, columns);
    const uint32_t base = vector_base(tile);
#pragma unroll
    for (int i = 0; i < kRowElements; i += 2) {
      if (!ptx::always()) continue;
      const float even = load_column(base, i);
      const float odd = load_column(base, i + 1);
#pragma unroll
      for (int r = 0; r < kQuadRows; ++r) {
        const OwnCoefficients row = own.of(r);
        float& first = element(acc, r, i);
        float& second = element(acc, r, i + 1);
        first = general_element(first, row, even);
        second = general_element(second, row, odd);
      }
    }
    if (!targets) return;
#pragma unroll
    for (int r = 0; r < kQuadRows; ++r) subtract_at(acc, r, lane_target(own.target, r), target_terms[r]);
  }
}

template <bool kGeneral, class View>
__device__ __forceinline__ void gradient_epilogue(Accumulators& acc, const View& tile,
                                                  const KernelParams<GradientArgs>& params) {
  const LogitsProduct& product = params.product;
  const GradientArgs& args = params.args;
  if constexpr (kGeneral) transform(acc, tile, product);
  const int row = tile.own_row();
  const int columns = static_cast<int>(product.columns);
  const int target = row < tile.rows() && product.target != nullptr ? load_target(product, row) : -1;
  const bool live = row < tile.rows() && !is_ignored(product, target);
  const float factor = args.factor == nullptr ? 1.f : *args.factor;
  OwnCoefficients own{};
  own.lse = load_or_zero(args.lse, row, live);
  const float low = load_or_zero(args.lse_residual, row, live);
  const float rest = ptx::exp2_approx(low * -kLog2E);
  own.a = load_or_zero(args.a, row, live) * factor * rest;
  own.g = load_or_zero(args.g, row, live) * factor;
  own.target = target_in_tile(tile, target, columns);
  if constexpr (kGeneral) {
    own.b = load_or_zero(args.b, row, live) * factor * rest;
    own.a = fmaf(-low, own.b, own.a);
    own.c = load_or_zero(args.c, row, live) * factor;
    own.inverse_cap = inverse_cap_of(params, tile, row);
    general_gradient(acc, own, tile, args, columns);
  } else {
    plain_gradient(acc, own, product.transform.scale, params.exponent_scale);
  }
  clear_dead_rows(acc, live);
}

}  // namespace logitless::cuda::fused
