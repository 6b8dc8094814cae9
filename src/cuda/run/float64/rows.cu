#include "cuda/rows/device_rows.cuh"
#include "cuda/run/float64/kernels.h"
#include "cuda/runtime/check.h"

namespace logitless::cuda::float64 {
namespace {

constexpr int kThreads = 256;
constexpr int kOneBlock = 1024;  // threads of kernels of a single block

__device__ double at_or(const double* data, int64_t index, double otherwise) {
  return data != nullptr ? data[index] : otherwise;
}

__device__ RowWeights<double> weights_at(const Inputs& in, int64_t row, int64_t target) {
  RowWeights<double> weights{at_or(in.token_weight, row, 1), at_or(in.class_weight, target, 1)};
  if (in.rows.targets_per_row > 0) weights.target_sum = in.rows.target_weight_sum[row + in.rows.shift];
  return weights;
}

__device__ double divisor_of(const Inputs& in, double weight_sum) {
  if (!in.rows.is_mean) return 1;
  if (in.num_items != nullptr) return *in.num_items;
  return in.rows.num_items > 0 ? in.rows.num_items : weight_sum;
}

// One block: each thread's rows and their sums have one order.
__global__ void __launch_bounds__(kOneBlock) prepare_rows_kernel(Inputs in, Arena arena, Buffers out) {
  __shared__ unsigned long long first_invalid;
  if (threadIdx.x == 0) first_invalid = ~0ull;
  __syncthreads();
  int64_t valid_count = 0, invalid_count = 0;
  double weight_sum = 0;
  for (int64_t row = threadIdx.x; row < in.rows.tokens; row += kOneBlock) {
    const int64_t target = target_of(in.rows, row);
    int32_t local = kIgnoredRow;
    if (target != in.rows.ignore_index && in_range(in.rows, target)) {
      const int64_t column = target - in.rows.vocab_start;
      local = column >= 0 && column < in.rows.vocab ? static_cast<int32_t>(column) : -1;
      ++valid_count;
      const RowWeights<double> weights = weights_at(in, row, target);
      weight_sum += weights.token * weights.target;
    } else if (target != in.rows.ignore_index) {
      ++invalid_count;
      atomicMin(&first_invalid, static_cast<unsigned long long>(row));
    }
    arena.target[row] = local;
  }
  double classes = 0;
  if (in.class_weight != nullptr && in.rows.loss.label_smoothing > 0) {
    for (int64_t j = threadIdx.x; j < in.rows.vocab_total; j += kOneBlock) classes += in.class_weight[j];
  }
  valid_count = block_sum<kOneBlock>(valid_count);
  invalid_count = block_sum<kOneBlock>(invalid_count);
  weight_sum = block_sum<kOneBlock>(weight_sum);
  classes = block_sum<kOneBlock>(classes);
  if (threadIdx.x != 0) return;
  if (in.class_weight == nullptr) classes = static_cast<double>(in.rows.vocab_total);
  *arena.scalars = {divisor_of(in, weight_sum), classes, invalid_count, 0};
  if (out.valid_count != nullptr) *out.valid_count = valid_count;
  if (out.invalid_targets == nullptr) return;
  out.invalid_targets[0] = invalid_count;
  out.invalid_targets[1] = invalid_count > 0 ? static_cast<int64_t>(first_invalid) : -1;
}

__global__ void finish_rows_kernel(Inputs in, Arena arena, Buffers out, bool is_shard) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= in.rows.tokens) return;
  arena.row_loss[row] = 0;
  if (arena.target[row] == kIgnoredRow) {
    put_ignored<double>(in.rows, out, row, target_of(in.rows, row) != in.rows.ignore_index);
    return;
  }
  const RowStats<double> stats = arena.stats[row];
  put_stats<double>(out, row, stats);
  if (is_shard) return;
  const int64_t target = target_of(in.rows, row);
  const RowLoss<double> loss =
      row_loss(known_loss(in.rows, *arena.scalars), weights_at(in, row, target), stats, target);
  arena.row_loss[row] = loss.loss;
#define LOGITLESS_PUT(name, ...) put<double>(out.name, row, loss.name);
  LOGITLESS_ROW_OUTPUTS(LOGITLESS_PUT)
#undef LOGITLESS_PUT
  put<double>(out.lse_low, row, rest_of(log_sum_exp_parts(stats), loss.lse));
  for (int64_t k = 0; k < in.rows.targets_per_row; ++k) {
    const int64_t at = row * in.rows.targets_per_row + k;
    const bool is_none = target_of(in.rows, row, k) == in.rows.ignore_index;
    put<double>(out.target_log_probs, at,
                is_none ? 0 : log_sum_exp_parts(stats).log_p(arena.target_logits[at]));
  }
  if (in.rows.is_none) put<double>(out.loss, row, loss.loss);
  if (loss.is_top1 > 0) atomicAdd(&arena.scalars->correct_count, 1ull);
}

__global__ void __launch_bounds__(kOneBlock) finish_loss_kernel(Inputs in, Arena arena, Buffers out) {
  double sum = 0;
  for (int64_t row = threadIdx.x; row < in.rows.tokens; row += kOneBlock) sum += arena.row_loss[row];
  sum = block_sum<kOneBlock>(sum);
  if (threadIdx.x != 0) return;
  const Scalars& s = *arena.scalars;
  if (!in.rows.is_none) put<double>(out.loss, 0, s.invalid_count > 0 ? CUDART_NAN : sum / s.divisor);
  if (out.correct_count != nullptr) *out.correct_count = static_cast<int64_t>(s.correct_count);
}

__global__ void row_gradients_kernel(Inputs in, Arena arena, Upstream upstream) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= in.rows.tokens || arena.target[row] == kIgnoredRow) return;
  const LogSumExp<double> lse = upstream.lse != nullptr
                                    ? LogSumExp<double>{upstream.lse[row], at_or(upstream.lse_low, row, 0)}
                                    : log_sum_exp_parts(arena.stats[row]);
  RowUpstream<double> given;
  given.loss = at_or(upstream.grad_loss, in.rows.is_none ? row : 0, 1) / arena.scalars->divisor;
#define LOGITLESS_LOAD(name) given.name = at_or(upstream.grad_##name, row, 0);
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_LOAD)
#undef LOGITLESS_LOAD
  const RowWeights<double> weights = weights_at(in, row, target_of(in.rows, row));
  const double inverse = in.temperature != nullptr ? inverse_temperature(in.temperature[row]) : 1;
  arena.gradients[row] = {lse, scaled(row_coefficients(known_loss(in.rows, *arena.scalars), weights, given,
                                                       lse.value(), at_or(upstream.entropy, row, 0)),
                                      inverse)};
}

}  // namespace

Inputs inputs_of(const Problem& p, const Buffers& b, const Arena& arena) {
  Inputs in{};
  in.rows = with_joined(row_inputs(p, b), arena.joined);
  in.rows.target_weight = nullptr;
  in.target_weight = static_cast<const double*>(b.target_weight);
  in.rows.class_weight = in.rows.token_weight = in.rows.temperature = in.rows.num_items_at = nullptr;
  in.class_weight = p.has.class_weight ? static_cast<const double*>(b.class_weight) : nullptr;
  in.token_weight = p.has.token_weight ? static_cast<const double*>(b.token_weight) : nullptr;
  in.num_items = static_cast<const double*>(b.num_items);
  in.bias = p.has.bias ? static_cast<const double*>(b.bias) : nullptr;
  in.temperature = p.has.temperature ? static_cast<const double*>(b.temperature) : nullptr;
  in.transform = logit_transform<double>(p);
  in.bias_scale = p.bias_scale;
  in.sums = wanted_sums(p);
  return in;
}

void launch_prepare_rows(const Inputs& in, const Arena& arena, const Buffers& out, cudaStream_t stream) {
  Queue(stream).launch(prepare_rows_kernel, 1, kOneBlock, 0, in, arena, out);
  check_launch("float64 prepare_rows");
}

void launch_finish_rows(const Inputs& in, const Arena& arena, const Buffers& out, bool is_shard,
                        cudaStream_t stream) {
  Queue(stream).launch(finish_rows_kernel, blocks_for(in.rows.tokens, kThreads), kThreads, 0, in, arena, out,
                       is_shard);
  check_launch("float64 finish_rows");
}

void launch_finish_loss(const Inputs& in, const Arena& arena, const Buffers& out, cudaStream_t stream) {
  Queue(stream).launch(finish_loss_kernel, 1, kOneBlock, 0, in, arena, out);
  check_launch("float64 finish_loss");
}

void launch_row_gradients(const Inputs& in, const Arena& arena, const Upstream& upstream,
                          cudaStream_t stream) {
  Queue(stream).launch(row_gradients_kernel, blocks_for(in.rows.tokens, kThreads), kThreads, 0, in, arena,
                       upstream);
  check_launch("float64 row_gradients");
}

}  // namespace logitless::cuda::float64
