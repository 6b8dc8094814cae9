#include "core/host_loss.h"

#include <algorithm>
#include <limits>

#include "core/backend.h"
#include "core/sampling.h"
#include "core/targets.h"

namespace logitless {
namespace {

double load_or(const void* data, DType dtype, int64_t index, double otherwise) {
  return data == nullptr ? otherwise : load_as_double(data, dtype, index);
}

void store_if(void* data, DType dtype, int64_t index, double value) {
  if (data != nullptr) store_from_double(data, dtype, index, value);
}

void store_if(uint8_t* data, DType /*stats*/, int64_t index, double value) {
  if (data != nullptr) data[index] = value > 0;
}

void write_ignored_losses(const Problem& problem, const Buffers& buffers, int64_t row) {
  const DType dtype = problem.stats_dtype();
#define LOGITLESS_STORE(name, ...) store_if(buffers.name, dtype, row, 0);
  LOGITLESS_ROW_OUTPUTS(LOGITLESS_STORE)
#undef LOGITLESS_STORE
  store_if(buffers.lse_residual, dtype, row, 0);
  store_if(buffers.loss_error, dtype, row, 0);
  if (problem.reduction == Reduction::kNone) store_if(buffers.loss, dtype, row, 0);
}

}  // namespace

HostLoss make_host_loss(const Problem& problem, const Buffers& buffers, const int64_t* rows,
                        int64_t row_count) {
  return {problem, buffers, loss_params(problem, class_weight_sum(problem, buffers)),
          reduction_divisor(problem, buffers, rows, row_count)};
}

RowWeights<double> row_weights(const HostLoss& context, int64_t row) {
  const Problem& p = context.problem;
  const DType dtype = p.stats_dtype();
  RowWeights<double> weights;
  if (p.has.token_weight) weights.token = load_as_double(context.buffers.token_weight, dtype, row);
  if (p.has.class_weight) {
    weights.target =
        load_as_double(context.buffers.class_weight, dtype, target_of_row(p, context.buffers.targets, row));
  }
  if (p.targets_per_row > 0) {
    weights.target_sum = 0;
    for (int64_t k = 0; k < p.targets_per_row; ++k) {
      weights.target_sum += target_weight_of_row(p, context.buffers, row, k);
    }
  }
  return weights;
}

double inverse_temperature_of_row(const Problem& problem, const Buffers& buffers, int64_t row) {
  if (!problem.has.temperature) return 1;
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
#define LOGITLESS_LOAD(name) \
  if (p.has.grad_##name) upstream.name = load_as_double(b.grad_##name, dtype, row);
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_LOAD)
#undef LOGITLESS_LOAD
  const RowCoefficients<double> k =
      row_coefficients(context.params, row_weights(context, row), upstream, lse, entropy);
  return p.has.temperature ? scaled(k, inverse_temperature_of_row(p, b, row)) : k;
}

LogSumExp<double> known_lse(const HostLoss& context, int64_t row) {
  const DType dtype = context.problem.stats_dtype();
  return {load_as_double(context.buffers.lse, dtype, row),
          load_or(context.buffers.lse_residual, dtype, row, 0)};
}

int64_t seed_of(const Problem& problem, const Buffers& buffers) {
  return buffers.seed == nullptr ? problem.seed : load_as_int64(buffers.seed, DType::kI64, 0);
}

SampleKey sample_key_of(const Problem& problem, const Buffers& buffers, int64_t row, int64_t sample) {
  const bool has_own = buffers.sample_seed != nullptr;
  const int64_t seed =
      has_own ? load_as_int64(buffers.sample_seed, DType::kI64, row) : seed_of(problem, buffers);
  return sample_key(static_cast<uint64_t>(seed), has_own ? 0 : static_cast<uint64_t>(row),
                    static_cast<uint64_t>(sample));
}

void write_ignored_defaults(const Problem& problem, const Buffers& buffers) {
  for (int64_t row = 0; row < problem.tokens; ++row) {
    write_row_stats(problem, buffers, row, {});
    write_ignored_losses(problem, buffers, row);
    for (int64_t at = row * problem.top_k; at < (row + 1) * problem.top_k; ++at) {
      if (buffers.top_ids != nullptr) buffers.top_ids[at] = -1;
      store_if(buffers.top_log_probs, problem.stats_dtype(), at, 0);
    }
    for (int64_t at = row * problem.num_samples; at < (row + 1) * problem.num_samples; ++at) {
      const DType dtype = problem.stats_dtype();
      if (buffers.sampled_ids != nullptr) buffers.sampled_ids[at] = -1;
      store_if(buffers.sampled_keys, dtype, at, -std::numeric_limits<double>::infinity());
      store_if(buffers.sampled_logits, dtype, at, 0);
      store_if(buffers.sampled_log_probs, dtype, at, 0);
    }
    for (int64_t k = 0; k < problem.targets_per_row; ++k) {
      store_if(buffers.target_log_probs, problem.stats_dtype(), row * problem.targets_per_row + k, 0);
    }
  }
}

void write_undrawn_defaults(const Problem& problem, const Buffers& buffers) {
  for (int64_t row = 0; row < problem.tokens; ++row) {
    if (buffers.kept_count != nullptr) buffers.kept_count[row] = 0;
    store_if(buffers.draw_variance, problem.stats_dtype(), row, 0);
  }
}

void HostLossWriter::add(int64_t row, const RowStats<double>& stats) {
  write_row_stats(context_.problem, context_.buffers, row, stats);
  add_losses(row, stats);
}

void HostLossWriter::add_losses(int64_t row, const RowStats<double>& stats) {
  const Problem& p = context_.problem;
  const Buffers& b = context_.buffers;
  const DType dtype = p.stats_dtype();
  ++valid_;
  if (p.is_unmerged_shard()) return;
  const RowLoss<double> out =
      row_loss(context_.params, row_weights(context_, row), stats, target_of_row(p, b.targets, row));
#define LOGITLESS_STORE(name, ...) store_if(b.name, dtype, row, out.name);
  LOGITLESS_ROW_OUTPUTS(LOGITLESS_STORE)
#undef LOGITLESS_STORE
  const double stored = dtype == DType::kF64 ? out.lse : static_cast<double>(static_cast<float>(out.lse));
  store_if(b.lse_residual, dtype, row, lse_residual_of(log_sum_exp_parts(stats), stored));
  if (p.reduction == Reduction::kNone) store_if(b.loss, dtype, row, out.loss);
  sum_ += out.loss;
  if (out.is_top1 > 0) ++correct_;
}

void HostLossWriter::finish() {
  const Problem& p = context_.problem;
  const Buffers& b = context_.buffers;
  if (b.valid_count != nullptr) *b.valid_count = valid_;
  if (p.is_unmerged_shard()) return;
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

void noise_on_host(const NoiseLists& lists, const BackendOptions& options, void* /*stream*/) {
  constexpr int64_t kPart = 1 << 12;
  const int64_t count = lists.rows * lists.columns;
  options.parallel_for((count + kPart - 1) / kPart, [&](int64_t part, int) {
    const int64_t end = std::min(count, (part + 1) * kPart);
    for (int64_t i = part * kPart; i < end; ++i) lists.make(i);
  });
}

RowStats<double> read_row_stats(const Problem& problem, const Buffers& buffers, int64_t row) {
  const DType dtype = problem.stats_dtype();
  RowStats<double> stats;
  stats.max = load_or(buffers.max, dtype, row, stats.max);
#define LOGITLESS_LOAD(name, part, kind, ...)        \
  stats.part = load_or(buffers.name, dtype, row, 0); \
  stats.part = moved_sum(stats.part, mass_of(SumKind::kind, stats), -offset_of(stats.max));
  LOGITLESS_ROW_SUMS(LOGITLESS_LOAD)
#undef LOGITLESS_LOAD
  if (buffers.argmax != nullptr) stats.argmax = buffers.argmax[row];
  return stats;
}

void write_row_stats(const Problem& problem, const Buffers& buffers, int64_t row,
                     const RowStats<double>& stats) {
  const DType dtype = problem.stats_dtype();
  store_if(buffers.max, dtype, row, stats.max);
#define LOGITLESS_STORE(name, part, kind, ...) \
  store_if(buffers.name, dtype, row, plain_sum(SumKind::kind, stats.part, stats));
  LOGITLESS_ROW_SUMS(LOGITLESS_STORE)
#undef LOGITLESS_STORE
  if (buffers.argmax != nullptr) buffers.argmax[row] = stats.argmax;
}

void losses_from_row_stats(const Problem& problem, const Buffers& buffers, int64_t* rows) {
  const int64_t row_count = compact_rows(problem, buffers.targets, rows);
  Problem whole = problem;  // the statistics are those of the whole vocabulary
  whole.vocab = whole.vocab_total;
  whole.vocab_start = 0;
  const HostLoss context = make_host_loss(whole, buffers, rows, row_count);
  // The statistics of ignored rows are already right: those of no column.
  for (int64_t row = 0; row < problem.tokens; ++row) write_ignored_losses(whole, buffers, row);
  HostLossWriter writer(context);
  const double class_weights = context.params.class_weight_sum;
  for (int64_t i = 0; i < row_count; ++i) {
    const RowStats<double> merged = read_row_stats(whole, buffers, rows[i]);
    writer.add_losses(rows[i], with_weighted_offset(merged, class_weights));
  }
  writer.finish();
}

}  // namespace logitless
