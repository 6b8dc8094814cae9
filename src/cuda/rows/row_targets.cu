#include "cuda/rows/vector8.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class Real>
__global__ void join_targets_kernel(RowInputsOf<Real> in, JoinedTargets to) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= in.tokens) return;
  int64_t joined = in.ignore_index;
  double sum = 0;
  for (int64_t k = 0; k < in.targets_per_row; ++k) {
    const int64_t at = row * in.targets_per_row + k, target = target_at(in, at);
    if (target == in.ignore_index) continue;
    if (!in_range(in, target)) {
      joined = target;
      break;
    }
    if (joined == in.ignore_index) joined = target;
    sum += in.target_weight != nullptr ? double{in.target_weight[at]} : 1;
  }
  to.target[row] = joined;
  to.weight_sum[row] = sum;
}

__device__ double rounded_to(double x, DType /*dtype*/) {
  return x;
}
__device__ float rounded_to(float x, DType dtype) {
  if (dtype == DType::kBF16) return to_float(from_float<__nv_bfloat16>(x));
  return dtype == DType::kF16 ? to_float(from_float<__half>(x)) : x;
}

// One warp for each target. The sum has the same order whether aligned or not.
template <class H, class C, bool kAligned, class Real = RealOf<H>>
__global__ void __launch_bounds__(kThreads) target_logits_kernel(RowTargets in, TargetLogits<Real> t) {
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t r = item / in.targets_per_row;
  if (r >= existing(t.row_count, t.rows) || t.target[r] == kIgnoredRow) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t target = target_of(in, t.row_map[r], item % in.targets_per_row);
  if (!is_here(in, target)) {
    if (lane == 0) t.logits[item] = 0;
    return;
  }
  const int64_t column = target - in.vocab_start;
  const H* hidden = t.hidden.template row<H>(t.row_map[r]);
  const C* weight = t.weight.template row<C>(column);
  Real sum = 0;
#pragma unroll 2
  for (int64_t i = 8 * lane; i < t.columns; i += 8 * 32) {
    const int left = static_cast<int>(min(t.columns - i, int64_t{8}));
    const Vector8<H> a = load8<kAligned>(hidden + i, left);
    const Vector8<C> b = load8<kAligned>(weight + i, left);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sum = std::fma(rounded_to(to_real(a.x[j]), t.operand_dtype),
                     rounded_to(to_real(b.x[j]), t.operand_dtype), sum);
    }
  }
  sum = warp_sum(sum);
  if (lane != 0) return;
  const LogitTransform<Real>& to_logit = t.transform;
  t.logits[item] = to_logit.logit(sum, to_logit.bias_of(column), to_logit.inverse_temperature_of(r));
}

// One thread for each target. If a row has a target twice, the first one writes.
template <class T, class Real = RealOf<T>>
__global__ void __launch_bounds__(kThreads)
    target_entries_kernel(RowInputsOf<Real> in, ArenaOf<Real> arena, TargetEntries<Real> e) {
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t r = item / in.targets_per_row, k = item % in.targets_per_row, computed = e.first + r;
  if (r >= existing(e.row_count, e.rows) || arena.target[computed] == kIgnoredRow) return;
  const int64_t row = arena.row_map[computed], target = target_of(in, row, k);
  const int64_t column = target - in.vocab_start - e.first_column;
  if (target == in.ignore_index || column < 0 || column >= e.columns) return;
  double q = 0;
  for (int64_t other = 0; other < in.targets_per_row; ++other) {
    if (target_of(in, row, other) != target) continue;
    if (other < k) return;
    q += target_weight_of(in, row, other);
  }
  RowCoefficients<double> c{arena.a[r], 0, 0, arena.g[r]};
  if (arena.b != nullptr) c.b = arena.b[r];
  if (arena.c != nullptr && !e.are_exp_logits) c.c = arena.c[r];  // else it stays apart
  const double z = arena.target_logits[item];
  const LogSumExp<double> lse{arena.lse[r], arena.lse_residual[r]};
  double d = dz_element<double>(c, lse.log_p(z), 1.0, q) *
             e.transform.slope(z, e.transform.inverse_temperature_of(computed));
  T& element = e.dz.template row<T>(r)[column];
  if (e.are_exp_logits) {
    const double factor = arena.row_factor[r];
    d = factor == 0 ? 0 : d / factor;
    if (arena.replaced != nullptr) static_cast<T*>(arena.replaced)[item] = element;
  } else if (e.scale != nullptr) {
    d *= double{*e.scale};
  }
  element = from_real<T>(static_cast<Real>(d));
}

// One thread for each target.
template <class T>
__global__ void __launch_bounds__(kThreads) restore_kernel(RowInputs in, Arena arena, RestoreExpLogits e) {
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t of_row = in.targets_per_row > 0 ? in.targets_per_row : 1, r = item / of_row;
  if (r >= existing(e.row_count, e.rows) || arena.target[r] == kIgnoredRow) return;
  int64_t column = arena.target[r];
  if (in.targets_per_row > 0) {
    const int64_t row = arena.row_map[r], k = item % of_row, target = target_of(in, row, k);
    for (int64_t other = 0; other < k; ++other) {
      if (target_of(in, row, other) == target) return;  // it was saved by the first one
    }
    column = target == in.ignore_index ? -1 : target - in.vocab_start;
  }
  if (column < 0 || column >= e.columns) return;
  e.exp_logits.row<T>(r)[column] = static_cast<const T*>(arena.replaced)[item];
}

}  // namespace

void launch_restore_exp_logits(const RowInputs& in, const Arena& arena, const RestoreExpLogits& e,
                               const Queue& queue) {
  for_dtype(e.exp_logits.dtype, [&](auto type) {
    queue.launch("restore", restore_kernel<decltype(type)>, blocks_for(e.rows * in.target_count(), kThreads),
                 kThreads, 0, in, arena, e);
  });
}

template <class Real>
void launch_join_targets(const RowInputsOf<Real>& in, const JoinedTargets& to, const Queue& queue) {
  queue.launch("join_targets", join_targets_kernel<Real>, blocks_for(in.tokens, kThreads), kThreads, 0, in,
               to);
}

template <class Real>
void launch_target_logits(const RowTargets& in, const TargetLogits<Real>& t, const Queue& queue) {
  const bool aligned = is_aligned8(t.hidden, t.columns) && is_aligned8(t.weight, t.columns);
  for_dtype<Real>(t.hidden.dtype, [&](auto h) {
    for_dtype<Real>(t.weight.dtype, [&](auto c) {
      using H = decltype(h);
      using C = decltype(c);
      const auto kernel = aligned ? target_logits_kernel<H, C, true> : target_logits_kernel<H, C, false>;
      queue.launch("target_logits", kernel, blocks_for(t.rows * in.targets_per_row, kWarps), kThreads, 0, in,
                   t);
    });
  });
}

template <class Real>
void launch_target_entries(const RowInputsOf<Real>& in, const ArenaOf<Real>& arena,
                           const TargetEntries<Real>& e, const Queue& queue) {
  for_dtype<Real>(e.dz.dtype, [&](auto element) {
    queue.launch("target_entries", target_entries_kernel<decltype(element)>,
                 blocks_for(e.rows * in.targets_per_row, kThreads), kThreads, 0, in, arena, e);
  });
}

#define LOGITLESS_INSTANTIATE(Real)                                                                \
  template void launch_join_targets(const RowInputsOf<Real>&, const JoinedTargets&, const Queue&); \
  template void launch_target_logits(const RowTargets&, const TargetLogits<Real>&, const Queue&);  \
  template void launch_target_entries(const RowInputsOf<Real>&, const ArenaOf<Real>&,              \
                                      const TargetEntries<Real>&, const Queue&);
LOGITLESS_INSTANTIATE(float)
LOGITLESS_INSTANTIATE(double)
#undef LOGITLESS_INSTANTIATE

}  // namespace logitless::cuda
