#include "cuda/plan/sizes.h"
#include "cuda/rows/device_rows.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 1024;

// One block walks all rows in order: the list of computed rows is ascending, and the divisor's sum has a
// fixed order.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    prepare_rows_kernel(RowInputsOf<Real> in, ArenaOf<Real> arena, int64_t chunk, int64_t chunks,
                        bool compact, bool fills, Buffers out) {
  __shared__ int warp_counts[kThreads / 32];
  __shared__ unsigned long long first_invalid;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  if (thread == 0) first_invalid = ~0ull;
  __syncthreads();
  int64_t base = 0;  // computed rows before this stretch
  int64_t invalid = 0;
  double weight_sum = 0;
  const auto load = [&](int64_t row) { return row < in.tokens ? target_of(in, row) : in.ignore_index; };
  int64_t next = load(thread);
  for (int64_t start = 0; start < in.tokens; start += kThreads) {
    const int64_t row = start + thread, target = next;
    next = load(row + kThreads);  // this load need not wait for the stretch
    const bool given = target != in.ignore_index;
    const bool valid = given && in_range(in, target);
    if (given && !valid) {
      ++invalid;
      atomicMin(&first_invalid, static_cast<unsigned long long>(row));
    }
    if (fills && !valid && row < in.tokens) store_ignored<Real>(in, out, row, given);
    if (valid && in.reduction == Reduction::kMean && in.num_items == 0) {
      const RowWeights<double> w = weights_of(in, row, target);
      weight_sum += w.token * w.target;
    }
    const unsigned ballot = __ballot_sync(~0u, valid);
    if (lane == 0) warp_counts[warp] = __popc(ballot);
    __syncthreads();
    static_assert(kThreads == 32 * 32);
    const int before = __reduce_add_sync(~0u, lane < warp ? warp_counts[lane] : 0);
    const int all = __reduce_add_sync(~0u, warp_counts[lane]);
    __syncthreads();
    const int64_t column = target - in.vocab_start;
    const int32_t local = column >= 0 && column < in.vocab ? static_cast<int32_t>(column) : -1;
    if (compact) {
      if (valid) {
        const int64_t at = base + before + __popc(ballot & ((1u << lane) - 1));
        arena.row_map[at] = static_cast<int32_t>(row);
        arena.target[at] = local;
        if (in.temperature != nullptr) {
          arena.inverse_temperature[at] = inverse_temperature(in.temperature[row]);
        }
      }
    } else if (row < in.tokens) {
      arena.row_map[row] = static_cast<int32_t>(row);
      arena.target[row] = valid ? local : kIgnoredRow;
      if (in.temperature != nullptr) {
        arena.inverse_temperature[row] = valid ? inverse_temperature(in.temperature[row]) : 1;
      }
    }
    base += all;
  }
  __syncthreads();
  if (!compact) {
    for (int64_t b = thread; b * kRowBlock < in.tokens; b += kThreads) {
      bool any = false;
      const int64_t end = min((b + 1) * kRowBlock, in.tokens);
      for (int64_t r = b * kRowBlock; r < end; ++r) any = any || arena.target[r] != kIgnoredRow;
      arena.active[b] = any;
    }
  }
  const double divisor = block_sum<kThreads>(weight_sum);
  const int64_t invalid_count = block_sum<kThreads>(invalid);
  double classes = 0;
  if (in.class_weight != nullptr && in.loss.label_smoothing > 0) {
    for (int64_t j = thread; j < in.vocab_total; j += kThreads) classes += in.class_weight[j];
  }
  classes = block_sum<kThreads>(classes);
  const int64_t computed = compact ? base : in.tokens;
  if (thread == 0) {
    Scalars s{};
    s.divisor = divisor;
    if (in.num_items > 0) s.divisor = in.num_items;
    if (in.num_items_at != nullptr) s.divisor = *in.num_items_at;
    if (in.reduction != Reduction::kMean) s.divisor = 1;
    s.class_weight_sum = in.class_weight != nullptr ? classes : static_cast<double>(in.vocab_total);
    s.valid_count = base;
    s.invalid_count = invalid_count;
    s.first_invalid = invalid_count > 0 ? static_cast<int64_t>(first_invalid) : -1;
    s.row_count = static_cast<int32_t>(computed);
    s.dz_scale = s.dz_unscale = s.zero_one[1] = 1;
    *arena.scalars = s;
    if (out.valid_count != nullptr) *out.valid_count = base;
    if (out.invalid_targets != nullptr) {
      out.invalid_targets[0] = invalid_count;
      out.invalid_targets[1] = s.first_invalid;
    }
  }
  for (int64_t i = thread; i < chunks; i += kThreads) {
    const int64_t left = computed - i * chunk;
    arena.chunk_rows[i] = static_cast<int32_t>(left < 0 ? 0 : left > chunk ? chunk : left);
  }
}

// Statistics of a gradient that every column contributes to.
__global__ void exact_draw_stats_kernel(RowTargets in, int32_t columns, int32_t* kept_count, float* variance,
                                        float* loss_error) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= in.tokens) return;
  const int64_t target = target_of(in, row);
  const bool computed = target != in.ignore_index && in_range(in, target);
  if (kept_count != nullptr) kept_count[row] = computed ? columns : 0;
  if (variance != nullptr) variance[row] = 0;
  if (loss_error != nullptr) loss_error[row] = 0;
}

}  // namespace

template <class Real>
RowInputsOf<Real> row_inputs(const Problem& p, const Buffers& b, const JoinedTargets& joined) {
  RowInputsOf<Real> in{};
  static_cast<Problem&>(in) = p;
  in.row_targets = b.targets;
  in.wide_row_targets = p.dtype.targets == DType::kI64;
  in.targets = p.targets_per_row > 0 ? joined.target : b.targets;
  in.wide_targets = p.targets_per_row > 0 || in.wide_row_targets;
  in.target_weight_sum = joined.weight_sum;
  in.class_weight = p.has.class_weight ? static_cast<const Real*>(b.class_weight) : nullptr;
  in.token_weight = p.has.token_weight ? static_cast<const Real*>(b.token_weight) : nullptr;
  in.temperature = p.has.temperature ? static_cast<const Real*>(b.temperature) : nullptr;
  in.loss = loss_params(p);
  in.num_items_at = static_cast<const Real*>(b.num_items);
  in.is_none = p.reduction == Reduction::kNone;
  in.target_weight = static_cast<const Real*>(b.target_weight);
  return in;
}
template RowInputs row_inputs(const Problem&, const Buffers&, const JoinedTargets&);
template RowInputsOf<double> row_inputs(const Problem&, const Buffers&, const JoinedTargets&);

template <class Real>
void launch_prepare_rows(const RowInputsOf<Real>& in, const ArenaOf<Real>& arena, int64_t chunk, bool compact,
                         bool fills, const Buffers& out, const Queue& queue) {
  const int64_t chunks = in.tokens == 0 ? 1 : (in.tokens + chunk - 1) / chunk;
  queue.launch("prepare_rows", prepare_rows_kernel<Real>, 1, kThreads, 0, in, arena, chunk, chunks, compact,
               fills, out);
}
template void launch_prepare_rows(const RowInputs&, const Arena&, int64_t, bool, bool, const Buffers&,
                                  const Queue&);
template void launch_prepare_rows(const RowInputsOf<double>&, const ArenaOf<double>&, int64_t, bool, bool,
                                  const Buffers&, const Queue&);

void launch_exact_draw_stats(const RowTargets& in, int64_t columns, const Buffers& out, const Queue& queue) {
  constexpr int kRows = 256;
  queue.launch("exact_draw_stats", exact_draw_stats_kernel, blocks_for(in.tokens, kRows), kRows, 0, in,
               static_cast<int32_t>(columns), out.kept_count, static_cast<float*>(out.draw_variance),
               static_cast<float*>(out.loss_error));
}

}  // namespace logitless::cuda
