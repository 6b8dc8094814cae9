#include "core/host_loss.h"

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "core/backend.h"
#include "core/targets.h"

namespace headroom {
namespace {

double load_or(const void* data, DType dtype, int64_t index, double otherwise) {
  return data == nullptr ? otherwise : load_as_double(data, dtype, index);
}

void store_if(void* data, DType dtype, int64_t index, double value) {
  if (data != nullptr) store_from_double(data, dtype, index, value);
}

}  // namespace

HostLoss make_host_loss(const Problem& problem, const Buffers& buffers, const int64_t* rows,
                        int64_t row_count) {
  HostLoss context{problem, buffers, {}, 1};
  context.params.label_smoothing = problem.label_smoothing;
  context.params.z_loss = problem.z_loss;
  context.params.class_weight_sum = class_weight_sum(problem, buffers);
  context.params.vocab_total = static_cast<double>(problem.vocab_total);
  context.divisor = reduction_divisor(problem, buffers, rows, row_count);
  return context;
}

RowWeights<double> row_weights(const HostLoss& context, int64_t row) {
  const Problem& p = context.problem;
  const DType dtype = p.stats_dtype();
  RowWeights<double> weights;
  if (p.has_token_weight) weights.token = load_as_double(context.buffers.token_weight, dtype, row);
  if (p.has_class_weight) {
    weights.target =
        load_as_double(context.buffers.class_weight, dtype, target_of_row(p, context.buffers.targets, row));
  }
  return weights;
}

double inverse_temperature_of_row(const Problem& problem, const Buffers& buffers, int64_t row) {
  if (!problem.has_temperature) return 1;
  const double t = load_as_double(buffers.temperature, problem.stats_dtype(), row);
  if (problem.stats_dtype() == DType::kF64) return inverse_temperature(t);
  return inverse_temperature(t, double{std::numeric_limits<float>::min()});
}

RowCoefficients<double> coefficients_of_row(const HostLoss& context, int64_t row, double lse,
                                            double entropy) {
  const Problem& p = context.problem;
  const Buffers& b = context.buffers;
  const DType dtype = p.stats_dtype();
  RowUpstream<double> upstream;
  const int64_t loss_index = p.reduction == Reduction::kNone ? row : 0;
  upstream.loss = load_or(b.grad_loss, dtype, loss_index, 1) / context.divisor;
  if (p.has_grad_nll) upstream.nll = load_as_double(b.grad_nll, dtype, row);
  if (p.has_grad_lse) upstream.lse = load_as_double(b.grad_lse, dtype, row);
  if (p.has_grad_entropy) upstream.entropy = load_as_double(b.grad_entropy, dtype, row);
  const RowCoefficients<double> k =
      row_coefficients(context.params, row_weights(context, row), upstream, lse, entropy);
  return p.has_temperature ? scaled(k, inverse_temperature_of_row(p, b, row)) : k;
}

LogSumExp<double> known_lse(const HostLoss& context, int64_t row) {
  const DType dtype = context.problem.stats_dtype();
  return {load_as_double(context.buffers.lse, dtype, row), load_or(context.buffers.lse_low, dtype, row, 0)};
}

int64_t seed_of(const Problem& problem, const Buffers& buffers) {
  return buffers.seed == nullptr ? problem.seed : load_as_int64(buffers.seed, DType::kI64, 0);
}

void write_ignored_defaults(const Problem& problem, const Buffers& buffers) {
  const DType dtype = problem.stats_dtype();
  const RowStats<double> none;
  for (int64_t row = 0; row < problem.tokens; ++row) {
    store_if(buffers.max, dtype, row, none.max);
    for (void* zeroed :
         {buffers.sum_exp, buffers.target_logit, buffers.sum_exp_logit, buffers.weighted_logit_sum,
          buffers.nll, buffers.lse, buffers.lse_low, buffers.entropy}) {
      store_if(zeroed, dtype, row, 0);
    }
    if (problem.reduction == Reduction::kNone) store_if(buffers.loss, dtype, row, 0);
    if (buffers.argmax != nullptr) buffers.argmax[row] = -1;
  }
}

void write_undrawn_defaults(const Problem& problem, const Buffers& buffers) {
  for (int64_t row = 0; row < problem.tokens; ++row) {
    if (buffers.kept_count != nullptr) buffers.kept_count[row] = 0;
    store_if(buffers.draw_variance, problem.stats_dtype(), row, 0);
  }
}

void HostLossWriter::add(int64_t row, const RowStats<double>& stats) {
  const Problem& p = context_.problem;
  const Buffers& b = context_.buffers;
  const DType dtype = p.stats_dtype();
  ++valid_;
  store_if(b.max, dtype, row, stats.max);
  store_if(b.sum_exp, dtype, row, stats.sum_exp);
  store_if(b.target_logit, dtype, row, stats.target_logit);
  store_if(b.sum_exp_logit, dtype, row, stats.sum_exp_logit);
  store_if(b.weighted_logit_sum, dtype, row, stats.weighted_logit_sum);
  if (b.argmax != nullptr) b.argmax[row] = stats.argmax;
  if (p.is_shard()) return;
  const RowLoss<double> out = row_loss(context_.params, row_weights(context_, row), stats);
  store_if(b.nll, dtype, row, out.nll);
  store_if(b.lse, dtype, row, out.lse);
  const double stored = dtype == DType::kF64 ? out.lse : static_cast<double>(static_cast<float>(out.lse));
  store_if(b.lse_low, dtype, row, rest_of(log_sum_exp_parts(stats), stored));
  store_if(b.entropy, dtype, row, out.entropy);
  if (p.reduction == Reduction::kNone) store_if(b.loss, dtype, row, out.loss);
  sum_ += out.loss;
  if (stats.argmax == target_of_row(p, b.targets, row)) ++correct_;
}

void HostLossWriter::finish() {
  const Problem& p = context_.problem;
  const Buffers& b = context_.buffers;
  if (b.valid_count != nullptr) *b.valid_count = valid_;
  if (p.is_shard()) return;
  if (p.reduction != Reduction::kNone) store_if(b.loss, p.stats_dtype(), 0, sum_ / context_.divisor);
  if (b.correct_count != nullptr) *b.correct_count = correct_;
}

void scale_on_host(std::span<const GradientArray> arrays, const void* factor, const BackendOptions& options,
                   void* /*stream*/) {
  const DType stats = arrays.front().dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const double by = load_as_double(factor, stats, 0);
  if (by == 1) return;
  constexpr int64_t kPart = 1 << 16;
  for (const GradientArray& array : arrays) {
    options.parallel_for((array.size + kPart - 1) / kPart, [&](int64_t part, int) {
      const int64_t end = std::min(array.size, (part + 1) * kPart);
      for (int64_t i = part * kPart; i < end; ++i) {
        const double value = load_as_double(array.data, array.dtype, i);
        if (value != 0) store_from_double(array.data, array.dtype, i, value * by);
      }
    });
  }
}

RowStats<double> read_row_stats(const Problem& problem, const Buffers& buffers, int64_t row) {
  const DType dtype = problem.stats_dtype();
  RowStats<double> stats;
  stats.max = load_or(buffers.max, dtype, row, stats.max);
  stats.sum_exp = load_or(buffers.sum_exp, dtype, row, 0);
  stats.target_logit = load_or(buffers.target_logit, dtype, row, 0);
  stats.sum_exp_logit = load_or(buffers.sum_exp_logit, dtype, row, 0);
  stats.weighted_logit_sum = load_or(buffers.weighted_logit_sum, dtype, row, 0);
  if (buffers.argmax != nullptr) stats.argmax = buffers.argmax[row];
  return stats;
}

void losses_from_row_stats(const Problem& problem, const Buffers& buffers, int64_t* rows) {
  const int64_t row_count = compact_rows(problem, buffers.targets, rows);
  Problem whole = problem;  // the statistics are those of the whole vocabulary
  whole.vocab = whole.vocab_total;
  whole.vocab_start = 0;
  const HostLoss context = make_host_loss(whole, buffers, rows, row_count);
  Buffers losses = buffers;  // the statistics of ignored rows are already those of no column
  losses.max = losses.sum_exp = losses.target_logit = losses.sum_exp_logit = losses.weighted_logit_sum =
      nullptr;
  losses.argmax = nullptr;
  write_ignored_defaults(whole, losses);
  HostLossWriter writer(context);
  for (int64_t i = 0; i < row_count; ++i) writer.add(rows[i], read_row_stats(whole, buffers, rows[i]));
  writer.finish();
}

}  // namespace headroom
