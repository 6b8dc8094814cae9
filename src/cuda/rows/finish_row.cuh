#pragma once
// Turns a row's statistics into its losses, coefficients and kept exp logits.
#include "cuda/rows/device_rows.cuh"
#include "cuda/rows/exp2.cuh"
#include "cuda/rows/logit_offset.h"

namespace logitless::cuda {

// merge() of load(partial) over all partials, in a fixed order. Called by a warp; lane 0 gets the result.
template <class Load>
__device__ RowStats<double> warp_merged(int64_t partials, int lane, const Load& load) {
  RowStats<double> all;
  for (int64_t s = lane; s < partials; s += 32) all = merge(all, load(s));
  for (int step = 16; step > 0; step /= 2) {
    RowStats<double> other;
    other.max = __shfl_down_sync(~0u, all.max, step);
#define LOGITLESS_FETCH(name, part, ...) other.part = __shfl_down_sync(~0u, all.part, step);
    LOGITLESS_ROW_SUMS(LOGITLESS_FETCH)
#undef LOGITLESS_FETCH
    other.argmax = __shfl_down_sync(~0u, all.argmax, step);
    all = merge(all, other);
  }
  return all;
}

// A row's sum over the partials, in a fixed order. Called by a warp.
template <class Real>
__device__ inline double warp_sum_of_partials(const PartialStatsOf<Real>& partials, const Real* values,
                                              int64_t r, int lane) {
  double sum = 0;
  for (int64_t s = lane; s < partials.partials; s += 32) sum += values[s * partials.stride + r];
  return warp_sum(sum);
}

// Statistics from sums relative to the row's logit offset, which becomes the max of the result. largest: the
// actual maximum, if the partials have it. Called by a warp; lane 0 gets the result.
template <class Real>
__device__ inline RowStats<double> joined_to_offset(const PartialStatsOf<Real>& partials, int64_t r,
                                                    double logit_offset, bool has_max, double* largest,
                                                    int lane) {
  RowStats<double> best;  // only maxima and their columns
  if (has_max) {
    best = warp_merged(partials.partials, lane, [&](int64_t s) {
      RowStats<double> one;
      one.max = partials.max[s * partials.stride + r];
      if (partials.argmax != nullptr) one.argmax = partials.argmax[s * partials.stride + r];
      return one;
    });
  }
  *largest = best.max;
  RowStats<double> all;
  all.max = logit_offset;
  all.argmax = best.argmax;
  all.sum_exp = warp_sum_of_partials(partials, partials.sum, r, lane);
#define LOGITLESS_SUM(name, part, ...) \
  if (partials.part != nullptr) all.part = warp_sum_of_partials(partials, partials.part, r, lane);
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_SUM)
#undef LOGITLESS_SUM
  return all;
}

// Statistics of row r from its partials; `local` is its target's column. largest: the maximum, if
// relative_to_offset sums have one. Called by a warp; lane 0 gets the result.
template <class Real>
__device__ inline RowStats<double> stats_of_row(const RowTargets& in, const ArenaOf<Real>& arena,
                                                const FinishRows& f, int64_t r, int32_t local,
                                                double* largest, int lane) {
  const PartialStatsOf<Real>& partials = arena.partials;
  RowStats<double> stats;
  if (f.relative_to_offset) {
    const float logit_offset = arena.logit_offset[r];
    stats = joined_to_offset(partials, r, f.base_2 ? rounded_offset(logit_offset) : double{logit_offset},
                             f.has_max, largest, lane);
  } else {
    stats = warp_merged(partials.partials, lane, [&](int64_t s) { return stats_of_partial(partials, s, r); });
  }
  if (lane != 0) return stats;
  stats.target_logit = local >= 0 ? double{arena.target_logit[r]} : 0;
  if (stats.argmax >= 0) stats.argmax += in.vocab_start;
  return stats;
}

// Statistics of row r over all ranks of a group, with the same bits on each rank.
__device__ inline RowStats<double> stats_of_group(const GroupStats& group, int64_t r, int lane) {
  RowStats<double> stats = warp_merged(group.partials.partials, lane,
                                       [&](int64_t s) { return stats_of_partial(group.partials, s, r); });
  if (lane == 0) stats.target_logit = sum_of_partials(group.partials, group.target_logit, r);
  return stats;
}

// The sum that kept exp logits are divided by, relative to their logit offset. In a group it may be far from
// the sum of this rank's columns. Then their probabilities vanish, and the bounds only keep products finite.
__device__ inline float sum_of_kept(const FinishRows& f, const RowStats<double>& stats, float logit_offset) {
  if (f.group.partials.partials == 0 && f.relative_to_offset)
    return static_cast<float>(stats.sum_exp * double{f.sum_unit});
  const double from = f.base_2 ? rounded_offset(logit_offset) : double{logit_offset};
  const double sum = stats.sum_exp * exp(stats.max - from) * double{f.sum_unit};
  return static_cast<float>(sum > 0x1p100 ? 0x1p100 : sum < 0x1p-120 ? 0x1p-120 : sum);
}

// A logit's exp in the units of the kept ones. Computed as in the kernel: if there is no other column, it
// equals the sum to the last bit.
__device__ inline float kept_exp(const FinishRows& f, float z, float logit_offset) {
  if (!f.base_2) return z == logit_offset ? 1.0f : exp_from(z, logit_offset);
  const SplitOffset split = split_offset(logit_offset);
  return f.sum_unit * exp2_approx(fmaf(z - split.far, kLog2E, split.shift));
}

// sum_k q_k z_k over the row's targets in this shard, if it has several. Targets of weight 0 are left out.
// Called by a warp.
template <class Real>
__device__ inline double sum_of_targets(const RowInputsOf<Real>& in, const ArenaOf<Real>& arena, int64_t r,
                                        int64_t row, int lane) {
  if (in.targets_per_row == 0) return 0;
  double sum = 0;
  for (int64_t k = lane; k < in.targets_per_row; k += 32) {
    const double q = target_weight_of(in, row, k);
    if (q != 0 && is_here(in, target_of(in, row, k))) {
      sum += q * double{arena.target_logits[r * in.targets_per_row + k]};
    }
  }
  return warp_sum(sum);
}

// Stores the log-probabilities of the row's targets, if it has several; 0 for targets in other shards. Called
// by a warp, after finish_row().
template <class Real>
__device__ inline void store_target_log_probs(const RowTargets& in, const ArenaOf<Real>& arena,
                                              const Buffers& out, int64_t r, int64_t computed, int lane) {
  if (in.targets_per_row == 0 || arena.target[computed] == kIgnoredRow) return;
  __syncwarp();
  const LogSumExp<double> lse{arena.lse[r], arena.lse_residual[r]};
  const int64_t row = arena.row_map[computed];
  for (int64_t k = lane; k < in.targets_per_row; k += 32) {
    const bool is_local = is_here(in, target_of(in, row, k));
    store_if<Real>(out.target_log_probs, row * in.targets_per_row + k,
                   is_local ? lse.log_p(arena.target_logits[r * in.targets_per_row + k]) : 0);
  }
}

// sum_k |q_k|: no entry of dz exceeds g times it.
template <class Real>
__device__ inline float largest_target_weight(const RowInputsOf<Real>& in, int64_t row) {
  if (in.targets_per_row == 0) return 1;
  double sum = 0;
  for (int64_t k = 0; k < in.targets_per_row; ++k) {
    if (target_of(in, row, k) != in.ignore_index) sum += fabs(target_weight_of(in, row, k));
  }
  return static_cast<float>(sum);
}

// Finishes row r of the chunk, which is computed row `computed`. Called by a warp; lane 0 writes.
template <class Real>
__device__ inline void finish_row(const RowInputsOf<Real>& in, const ArenaOf<Real>& arena, const Buffers& out,
                                  const FinishRows& f, int64_t r, int64_t computed, int lane) {
  const int32_t local = arena.target[computed];
  if (local == kIgnoredRow) {
    if (lane == 0) arena.row_loss[computed] = arena.lse[r] = arena.lse_residual[r] = 0;
    return;
  }
  const int64_t row = arena.row_map[computed];
  const int64_t target = target_of(in, row);
  const bool in_group = f.group.partials.partials > 0;
  double largest = 0;
  RowStats<double> stats =
      in_group ? stats_of_group(f.group, r, lane) : stats_of_row(in, arena, f, r, local, &largest, lane);
  const double target_logits = in_group ? 0 : sum_of_targets(in, arena, r, row, lane);
  if (lane != 0) return;
  if (in.targets_per_row > 0 && !in_group) stats.target_logit = target_logits;
  RowStats<double> outputs = stats;
  if (!in_group && f.relative_to_offset && f.has_max) outputs = rebase(stats, largest);
  store_stats<Real>(out, row, outputs);
  const LogSumExp<Real> lse = split_to<Real>(log_sum_exp_parts(stats));
  arena.lse[r] = lse.high;  // written for a shard as well: its draws need it
  arena.lse_residual[r] = lse.low;
  if (f.is_shard) return;
  const LossParams<double> params = known_loss(in, *arena.scalars);
  RowLoss<double> loss = row_loss(params, weights_of(in, row, target),
                                  with_weighted_offset(stats, params.class_weight_sum), target);
  loss.max_logit = outputs.max;
  if constexpr (std::is_same_v<Real, float>) {
    if (arena.kept_sum != nullptr) {  // exp logits are kept
      arena.kept_sum[r] = sum_of_kept(f, stats, arena.logit_offset[r]);
      if (local >= 0) arena.target_exp[r] = kept_exp(f, arena.target_logit[r], arena.logit_offset[r]);
    }
  }
  arena.row_loss[computed] = static_cast<Real>(loss.loss);
#define LOGITLESS_STORE(name, ...) store_if<Real>(out.name, row, loss.name);
  LOGITLESS_ROW_OUTPUTS(LOGITLESS_STORE)
#undef LOGITLESS_STORE
  store_if<Real>(out.lse, row, lse.high);  // completed by lse_residual
  store_if<Real>(out.lse_residual, row, lse.low);
  if (in.is_none) store_if<Real>(out.loss, row, loss.loss);
  if (out.correct_count != nullptr && loss.is_top1 > 0) atomicAdd(&arena.scalars->correct_count, 1ull);
}

template <class Real>
__device__ inline Real at_or(const Real* data, int64_t index, std::type_identity_t<Real> otherwise) {
  return data != nullptr ? data[index] : otherwise;
}

// Called by one thread, after finish_row() if that is called.
template <class Real>
__device__ inline void load_coefficients(const RowInputsOf<Real>& in, const ArenaOf<Real>& arena,
                                         const Coefficients<Real>& k, int64_t r, int64_t computed) {
  if (arena.target[computed] == kIgnoredRow) {
    arena.lse[r] = arena.lse_residual[r] = arena.a[r] = arena.g[r] = 0;
    if (arena.b != nullptr) arena.b[r] = 0;
    if (arena.c != nullptr) arena.c[r] = 0;
    return;
  }
  const int64_t row = arena.row_map[computed];
  const int64_t target = target_of(in, row);
  RowUpstream<double> upstream;
  upstream.loss = double{at_or(k.grad_loss, in.is_none ? row : 0, 1)} / arena.scalars->divisor;
#define LOGITLESS_LOAD(name) upstream.name = at_or(k.grad_##name, row, 0);
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_LOAD)
#undef LOGITLESS_LOAD
  if (k.known_lse != nullptr) {
    arena.lse[r] = k.known_lse[row];
    arena.lse_residual[r] = at_or(k.known_lse_residual, row, 0);
  }
  const RowCoefficients<double> c =
      scaled(row_coefficients(known_loss(in, *arena.scalars), weights_of(in, row, target), upstream,
                              double{arena.lse[r]} + double{arena.lse_residual[r]},
                              double{at_or(k.entropy, row, 0)}),
             double{k.scale} * double{at_or(arena.inverse_temperature, computed, 1)});
  arena.a[r] = static_cast<Real>(c.a);
  arena.g[r] = static_cast<Real>(c.g);
  if (arena.b != nullptr) arena.b[r] = static_cast<Real>(c.b);
  if (arena.c != nullptr) arena.c[r] = static_cast<Real>(c.c);
  if (k.scale_dz) {
    const float of_targets = fabsf(static_cast<float>(arena.g[r])) * largest_target_weight(in, row);
    const float largest =
        fmaxf(fmaxf(fabsf(static_cast<float>(arena.a[r])), of_targets), static_cast<float>(fabs(c.b)));
    if (largest < CUDART_INF_F) atomicMax(&arena.scalars->dz_max, __float_as_uint(largest));
  }
}

// Returns the row's factor. Called by one thread, after load_coefficients().
template <class T>
__device__ float correct_target(const RowInputs& in, const Arena& arena, const CachedExpLogits& k, int64_t r,
                                int64_t computed) {
  const bool has_several = in.targets_per_row > 0;  // their entries are written later
  const int32_t column = arena.target[computed];
  float a = arena.a[r];
  const float g = arena.g[r];
  const float sum = arena.kept_sum[r];
  const bool writes = column >= 0 && column < k.columns && !has_several;
  // If only targets have a gradient, or nearly so, their entries are made large instead. They are relative to
  // the sum of exp logits, and must not exceed the largest operand. In a group the sum covers all ranks: if
  // it exceeds any sum of these columns, a is raised in proportion.
  if (has_several || writes) {
    const float least = fmaxf(0x1p-30f, 0x1p-97f * sum) * g;
    if (fabsf(a) < fabsf(least)) a = least;
  }
  float factor = a / sum;
  if (writes) {
    double entry = a == 0 ? 0 : double{arena.target_exp[r]} - double{g} / double{a} * double{sum};
    entry *= k.transform.slope(double{arena.target_logit[r]}, k.transform.inverse_temperature_of(computed));
    const T stored = from_float<T>(static_cast<float>(entry));
    T& kept = k.exp_logits.row<T>(r)[column];
    if (arena.replaced != nullptr) static_cast<T*>(arena.replaced)[r] = kept;
    kept = stored;
    if constexpr (!std::is_same_v<T, float>) {
      // The target's entry makes up most of many rows' gradients. The row's factor is corrected for its
      // rounding. This changes the other entries by no more than their own rounding.
      const double share = entry / double{to_float(stored)};
      if (fabs(share - 1) <= 0x1p-8) factor = static_cast<float>(double{factor} * share);
    }
  }
  arena.row_factor[r] = factor;
  return factor;
}

}  // namespace logitless::cuda
