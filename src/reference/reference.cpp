#include <algorithm>
#include <cmath>

#include "core/fp8.h"
#include "core/group_stats.h"
#include "core/host_loss.h"
#include "core/sparsification.h"
#include "core/targets.h"
#include "reference/backend.h"

namespace logitless::reference {
namespace {

struct Scratch {
  std::span<int64_t> rows;                              // [N] the rows that are not ignored
  std::span<RowStats<double>> stats;                    // [N] forward
  std::span<double> gathered;                           // [ranks, numbers, N] the statistics of a group
  std::span<RowCoefficients<double>> coefficients;      // [N] backward
  std::span<LogSumExp<double>> lse;                     // [N] backward
  std::span<double> accumulator;                        // [threads, D] backward
  std::span<TopLogit<double>> top;                      // [N, top_k]
  std::span<SampledLogit<double>> samples;              // [N, num_samples]
  std::span<int32_t> hidden_exponent, weight_exponent;  // [N], [V] of rows that are rounded to e4m3
  std::span<LogSumExp<double>> lse8;                    // [N] behind a screen
  int64_t seed = 0;                                     // seed of sparsified gradients
};

double load(const void* data, DType dtype, int64_t index) {
  return load_as_double(data, dtype, index);
}

// Returns an operand's element as the products see it.
double load_operand(const Problem& p, const void* data, DType dtype, int64_t index) {
  const double value = load(data, dtype, index);
  return p.rounds(dtype) ? rounded_to(p.product_dtype(), static_cast<float>(value)) : value;
}

double hidden_at(const Problem& p, const Buffers& b, int64_t row, int64_t k) {
  return load_operand(p, b.hidden, p.dtype.hidden, row * b.hidden_stride + k);
}

double weight_at(const Problem& p, const Buffers& b, int64_t column, int64_t k) {
  return load_operand(p, b.weight, p.dtype.weight, column * b.weight_stride + k);
}

// Finds the exponents of an operand's rows. at(row, k): its elements.
template <class At>
void find_exponents(const At& at, int64_t columns, std::span<int32_t> exponents) {
  for (size_t i = 0; i < exponents.size(); ++i) {
    float largest = 0;
    for (int64_t k = 0; k < columns; ++k) {
      largest = std::max(largest, std::fabs(static_cast<float>(at(static_cast<int64_t>(i), k))));
    }
    exponents[i] = fp8_row_exponent(largest);
  }
}

void find_exponents(const Problem& p, const Buffers& b, const Scratch& s) {
  find_exponents([&](int64_t i, int64_t k) { return hidden_at(p, b, i, k); }, p.hidden, s.hidden_exponent);
  if (p.screen_weight_bytes > 0) return;  // they are those of an earlier run
  find_exponents([&](int64_t j, int64_t k) { return weight_at(p, b, j, k); }, p.hidden, s.weight_exponent);
}

struct Logit {
  double z = 0;
  double slope = 1;  // T dz / d(scale * dot + bias): the derivative of the softcap
};

Logit logit_of(const Problem& p, const Buffers& b, int64_t row, int64_t column, double dot) {
  Logit out{p.scale * dot};
  if (p.has.bias) out.z += p.bias_scale * load(b.bias, p.dtype.bias, column);
  if (p.softcap > 0) {
    const double t = std::tanh(out.z / p.softcap);
    out = {p.softcap * t, 1 - t * t};
  }
  if (p.has.temperature) out.z *= inverse_temperature_of_row(p, b, row);
  return out;
}

// The product of rows in e4m3.
double rounded_dot(const Problem& p, const Buffers& b, const Scratch& s, int64_t row, int64_t column) {
  double dot = 0;
  const int hidden = s.hidden_exponent[static_cast<size_t>(row)];
  const int weight = s.weight_exponent[static_cast<size_t>(column)];
  for (int64_t k = 0; k < p.hidden; ++k) {
    const auto e = static_cast<float>(hidden_at(p, b, row, k));
    const auto c = static_cast<float>(weight_at(p, b, column, k));
    dot += static_cast<double>(screened(e, hidden)) * static_cast<double>(screened(c, weight));
  }
  return dot;
}

Logit logit(const Problem& p, const Buffers& b, const Scratch& s, int64_t row, int64_t column) {
  if (p.has_fp8_logits()) return logit_of(p, b, row, column, rounded_dot(p, b, s, row, column));
  double dot = 0;
  for (int64_t k = 0; k < p.hidden; ++k) {
    dot += hidden_at(p, b, row, k) * weight_at(p, b, column, k);
  }
  return logit_of(p, b, row, column, dot);
}

// z8
double screened_logit(const Problem& p, const Buffers& b, const Scratch& s, int64_t row, int64_t column) {
  return logit_of(p, b, row, column, rounded_dot(p, b, s, row, column)).z;
}

double class_weight(const Problem& p, const Buffers& b, int64_t column) {
  return p.has.class_weight ? load(b.class_weight, p.stats_dtype(), p.vocab_start + column) : 1;
}

// Returns the statistics of one logit of class weight w, and of weight q as a target. p log p is 0 at z =
// -inf.
RowStats<double> single(const WantedSums& sums, double z, double w, int64_t id, double q) {
  RowStats<double> stats;
  stats.max = z;
  stats.argmax = id;
  const double d = z - offset_of(z);
  const double e = std::isnan(z) || z == INFINITY ? NAN : (z == -INFINITY ? 0 : 1);  // as in PyTorch
#define LOGITLESS_SUM(name, part, kind, term) \
  if (sums.name) stats.part = term;
  LOGITLESS_ROW_SUMS(LOGITLESS_SUM)
#undef LOGITLESS_SUM
  if (sums.weighted_logit_sum) stats.weight = w;
  return stats;
}

// Returns a row's statistics and fills `top` with its largest logits in order, as many as fit. The id is -1
// if there are fewer columns. `samples` get its samples.
RowStats<double> row_stats(const Problem& p, const Buffers& b, const Scratch& s, int64_t row,
                           std::span<TopLogit<double>> top, std::span<SampledLogit<double>> samples) {
  const WantedSums sums = wanted_sums(p);
  RowStats<double> total;
  int64_t count = 0;
  std::fill(top.begin(), top.end(), TopLogit<double>{0, -1});
  std::fill(samples.begin(), samples.end(), SampledLogit<double>{});
  const ColumnMask mask = column_mask(p, b);
  for (int64_t j = 0; j < p.vocab; ++j) {
    const bool is_masked = mask.words != nullptr && !ColumnMask::has(mask.of_row(row), j);
    const double z = is_masked ? -INFINITY : logit(p, b, s, row, j).z;
    if (!top.empty()) count = insert_top(top, count, {z, p.vocab_start + j});
    const int64_t id = p.vocab_start + j;
    for (size_t k = 0; k < samples.size(); ++k) {
      add_to_sample(samples[k], sample_key_of(p, b, row, static_cast<int64_t>(k)), z, id);
    }
    total = merge(total, single(sums, z, class_weight(p, b, j), id, weight_as_target(p, b, row, id)));
  }
  return total;
}

// Writes the log-probabilities of several targets.
void write_targets(const Problem& p, const Buffers& b, const Scratch& s, int64_t row,
                   const LogSumExp<double>& lse) {
  double z[kMostTargetsPerRow] = {};
  for (int64_t k = 0; k < p.targets_per_row; ++k) {
    const int64_t target = target_of_row(p, b.targets, row, k);
    if (is_here(p, target)) z[k] = logit(p, b, s, row, target - p.vocab_start).z;
  }
  write_target_log_probs<double>(p, b, row, {z, static_cast<size_t>(p.targets_per_row)}, lse);
}

// Returns the number that stands for the probability in the gradient: the probability itself, or the result
// of drawing every element on its own.
double weight(const Problem& p, const Scratch& s, int64_t row, int64_t column, double probability) {
  if (!p.is_sparsified() || !(probability < p.threshold)) return probability;
  const uint32_t bits = draw_bits(static_cast<uint64_t>(s.seed), static_cast<uint32_t>(row),
                                  static_cast<uint32_t>(p.vocab_start + column));
  return draw_uniform(bits) * p.threshold < probability ? p.threshold : 0;
}

// Puts an estimate in the place of the row's sum of exp logits, and writes its error.
void screen_row(const Problem& p, const Buffers& b, const Scratch& s, int64_t i, RowStats<double>* stats) {
  const int64_t row = s.rows[static_cast<size_t>(i)];
  RowStats<double> of_screen;
  WantedSums sums;
  sums.sum_exp = true;
  for (int64_t j = 0; j < p.vocab; ++j) {
    of_screen = merge(of_screen, single(sums, screened_logit(p, b, s, row, j), 1, j, 0));
  }
  const LogSumExp<double> lse8 = s.lse8[static_cast<size_t>(i)] = log_sum_exp_parts(of_screen);
  ScreenedSum<double> sum;
  for (int64_t j = 0; j < p.vocab; ++j) {
    const double z8 = screened_logit(p, b, s, row, j);
    const double p8 = std::exp(lse8.log_p(z8));
    const bool certain = weight_as_target(p, b, row, j) != 0;
    const double w8 = certain ? p8 : weight(p, s, row, j, p8);
    const double z = logit(p, b, s, row, j).z;
    if (certain || w8 != 0) sum.add(certain ? 1 : p8 / w8, lse8.log_p(z), lse8.log_p(z8));
  }
  stats->max = lse8.high;
  stats->sum_exp = std::exp(lse8.low + sum.log_sum());
  if (b.loss_error != nullptr) {
    store_from_double(b.loss_error, p.stats_dtype(), row, std::sqrt(sum.relative_variance()));
  }
}

// dL / d(scale * dot + bias) of one logit, and its parts.
struct LogitGradient {
  double d = 0;            // the whole derivative
  double probability = 0;  // the exact probability
  double weight = 0;       // number in the place of the probability
  double factor = 0;       // factor of the weight
  double exact = 0;        // weight * factor, and the target's own part
};

LogitGradient d_logit(const Problem& p, const Buffers& b, const Scratch& s, int64_t i, int64_t column) {
  const int64_t row = s.rows[static_cast<size_t>(i)];
  const RowCoefficients<double>& k = s.coefficients[static_cast<size_t>(i)];
  const auto [z, slope] = logit(p, b, s, row, column);
  const double q = weight_as_target(p, b, row, p.vocab_start + column);
  LogitGradient out;
  const double log_p = s.lse[static_cast<size_t>(i)].log_p(z);
  out.probability = std::exp(log_p);
  if (q != 0) {
    out.weight = out.probability;
  } else if (p.screens()) {
    const double z8 = screened_logit(p, b, s, row, column);
    const double p8 = std::exp(s.lse8[static_cast<size_t>(i)].log_p(z8));
    const double w8 = weight(p, s, row, column, p8);
    out.weight = w8 == 0 ? 0 : out.probability * (w8 / p8);
  } else {
    out.weight = weight(p, s, row, column, out.probability);
  }
  out.factor = probability_factor(k, log_p) * slope;
  const double dense = k.c == 0 ? 0 : k.c * class_weight(p, b, column) * slope;
  if (q != 0) {
    out.d = dz_element(k, log_p, class_weight(p, b, column), q) * slope;
    out.exact = out.d - dense;
  } else {
    out.exact = out.weight == 0 ? 0 : out.weight * out.factor;
    out.d = out.exact + dense;
  }
  return out;
}

void store_gradient(void* data, DType dtype, int64_t index, double value, bool accumulate) {
  if (accumulate) value += load(data, dtype, index);
  store_from_double(data, dtype, index, value);
}

void forward(const Problem& p, const HostLoss& context, const Scratch& s, int64_t count,
             const ParallelFor& parallel_for, const Communicator* group) {
  const Buffers& b = context.buffers;
  write_ignored_defaults(p, b);
  const auto k = static_cast<size_t>(p.top_k);
  const auto top_of = [&](int64_t i) { return s.top.subspan(static_cast<size_t>(i) * k, k); };
  const auto samples_of = [&, count = static_cast<size_t>(p.num_samples)](int64_t i) {
    return s.samples.subspan(static_cast<size_t>(i) * count, count);
  };
  parallel_for(count, [&](int64_t i, int) {
    RowStats<double>& stats = s.stats[static_cast<size_t>(i)];
    stats = row_stats(p, b, s, s.rows[static_cast<size_t>(i)], top_of(i), samples_of(i));
    if (p.screens()) screen_row(p, b, s, i, &stats);
  });
  if (group != nullptr) {
    join_over_group(p, *group, parallel_for, s.stats.first(static_cast<size_t>(count)), s.top, s.gathered);
  }
  parallel_for(count, [&](int64_t i, int) {
    const int64_t row = s.rows[static_cast<size_t>(i)];
    const LogSumExp<double> lse = log_sum_exp_parts(s.stats[static_cast<size_t>(i)]);
    write_top<double>(p, b, row, top_of(i), lse);
    for (int64_t sample = 0; sample < p.num_samples; ++sample) {
      write_sample(p, b, row, sample, samples_of(i)[static_cast<size_t>(sample)], lse);
    }
    if (b.target_log_probs != nullptr) write_targets(p, b, s, row, lse);
  });
  HostLossWriter writer(context);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) writer.add(s.rows[i], s.stats[i]);
  writer.finish();
}

void fill_coefficients(const Problem& p, const HostLoss& context, const Scratch& s, int64_t count) {
  const Buffers& b = context.buffers;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const int64_t row = s.rows[i];
    double entropy = 0;
    if (p.needs_forward()) {
      s.lse[i] = log_sum_exp_parts(s.stats[i]);
    } else {
      s.lse[i] = known_lse(context, row);
      if (p.has.grad_entropy) entropy = load(b.entropy, p.stats_dtype(), row);
    }
    s.coefficients[i] = coefficients_of_row(context, row, s.lse[i].value(), entropy);
  }
}

// Computes one row of dE: scale * sum_j dz_ij C_j.
void d_hidden_row(const Problem& p, const Buffers& b, const Scratch& s, int64_t i, double* accumulator) {
  for (int64_t k = 0; k < p.hidden; ++k) accumulator[k] = 0;
  for (int64_t j = 0; j < p.vocab; ++j) {
    const double d = p.scale * d_logit(p, b, s, i, j).d;
    for (int64_t k = 0; k < p.hidden; ++k) {
      accumulator[k] += d * weight_at(p, b, j, k);
    }
  }
  const int64_t row = s.rows[static_cast<size_t>(i)];
  for (int64_t k = 0; k < p.hidden; ++k) {
    store_gradient(b.d_hidden, p.dtype.d_hidden, row * b.d_hidden_stride + k, accumulator[k],
                   p.accumulate.d_hidden);
  }
}

// Computes one row of dC, scale * sum_i dz_ij E_i, and of dbias, sum_i dz_ij.
void d_weight_row(const Problem& p, const Buffers& b, const Scratch& s, int64_t count, int64_t j,
                  double* accumulator) {
  double d_bias = 0;
  for (int64_t k = 0; k < p.hidden; ++k) accumulator[k] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double d = d_logit(p, b, s, i, j).d;
    d_bias += d;
    if (!p.has.d_weight) continue;
    const int64_t row = s.rows[static_cast<size_t>(i)];
    for (int64_t k = 0; k < p.hidden; ++k) {
      accumulator[k] += p.scale * d * hidden_at(p, b, row, k);
    }
  }
  if (p.has.d_bias) {
    store_gradient(b.d_bias, p.dtype.d_bias, j, p.bias_scale * d_bias, p.accumulate.d_bias);
  }
  if (!p.has.d_weight) return;
  for (int64_t k = 0; k < p.hidden; ++k) {
    store_gradient(b.d_weight, p.dtype.d_weight, j * b.d_weight_stride + k, accumulator[k],
                   p.accumulate.d_weight);
  }
}

void zero_ignored_d_hidden(const Problem& p, const Buffers& b) {
  if (!p.has.d_hidden || p.accumulate.d_hidden) return;
  for (int64_t row = 0; row < p.tokens; ++row) {
    if (target_of_row(p, b.targets, row) != p.ignore_index) continue;
    for (int64_t k = 0; k < p.hidden; ++k) {
      store_from_double(b.d_hidden, p.dtype.d_hidden, row * b.d_hidden_stride + k, 0);
    }
  }
}

// Writes the diagnostics of the draw that made a row's gradient.
void report_draw(const Problem& p, const Buffers& b, const Scratch& s, int64_t i) {
  const int64_t row = s.rows[static_cast<size_t>(i)];
  const int64_t target = target_of_row(p, b.targets, row) - p.vocab_start;
  int32_t kept = 0;
  DrawVariance<double> variance;
  for (int64_t j = 0; j < p.vocab; ++j) {
    const LogitGradient g = d_logit(p, b, s, i, j);
    if (g.weight == 0 && j != target) continue;
    ++kept;
    if (j == target || g.weight == g.probability) {
      variance.add_exact(g.exact);
    } else {
      variance.add_drawn(g.probability, g.factor, g.weight);
    }
  }
  if (b.kept_count != nullptr) b.kept_count[row] = kept;
  if (b.draw_variance != nullptr) {
    store_from_double(b.draw_variance, p.stats_dtype(), row, variance.relative());
  }
}

void report_draws(const Problem& p, const Buffers& b, const Scratch& s, int64_t count,
                  const ParallelFor& parallel_for) {
  if (b.kept_count == nullptr && b.draw_variance == nullptr) return;
  write_undrawn_defaults(p, b);
  parallel_for(count, [&](int64_t i, int) { report_draw(p, b, s, i); });
}

void backward(const Problem& p, const HostLoss& context, const Scratch& s, int64_t count,
              const ParallelFor& parallel_for) {
  const Buffers& b = context.buffers;
  fill_coefficients(p, context, s, count);
  zero_ignored_d_hidden(p, b);
  report_draws(p, b, s, count, parallel_for);
  const auto accumulator = [&](int worker) { return s.accumulator.data() + worker * p.hidden; };
  if (p.has.d_hidden) {
    parallel_for(count, [&](int64_t i, int worker) { d_hidden_row(p, b, s, i, accumulator(worker)); });
  }
  if (p.has.d_weight || p.has.d_bias) {
    parallel_for(p.vocab,
                 [&](int64_t j, int worker) { d_weight_row(p, b, s, count, j, accumulator(worker)); });
  }
}

Scratch lay_out(const Problem& problem, int threads, Workspace& workspace, void* screen_weight = nullptr) {
  Scratch s;
  s.rows = workspace.take<int64_t>(problem.tokens);
  if (problem.needs_forward()) s.stats = workspace.take<RowStats<double>>(problem.tokens);
  if (problem.in_group() && problem.needs_forward()) {
    s.gathered = workspace.take<double>(host_numbers(problem, problem.tokens));
  }
  if (problem.rounds_rows()) {
    s.hidden_exponent = workspace.take<int32_t>(problem.tokens);
    // All ranks of a group plan for its largest shard.
    Workspace kept(screen_weight);
    Workspace& of_weight = host_screen_weight_bytes(problem) > 0 ? kept : workspace;
    const auto exponents = of_weight.take<int32_t>(std::max(problem.vocab, problem.group_vocab));
    s.weight_exponent = exponents.first(std::min(exponents.size(), static_cast<size_t>(problem.vocab)));
  }
  if (problem.screens()) s.lse8 = workspace.take<LogSumExp<double>>(problem.tokens);
  s.top = workspace.take<TopLogit<double>>(problem.tokens * problem.top_k);
  s.samples = workspace.take<SampledLogit<double>>(problem.tokens * problem.num_samples);
  if (problem.needs_backward()) {
    s.coefficients = workspace.take<RowCoefficients<double>>(problem.tokens);
    s.lse = workspace.take<LogSumExp<double>>(problem.tokens);
    s.accumulator = workspace.take<double>(threads * problem.hidden);
  }
  return s;
}

std::string why_unavailable(const BackendOptions&) {
  return "";
}
std::string describe(const BackendOptions&) {
  return "portable C++, float64 arithmetic, one thread per row";
}
std::string why_unsupported(const Problem&, const BackendOptions& options) {
  return options.on_host() ? "" : "the buffers are in the memory of a CUDA device";
}

PlanKind kind_of(const Problem& problem) {
  if (problem.is_sparsified()) return PlanKind::kSparsified;
  if (problem.pass == Pass::kForward) return PlanKind::kForward;
  return problem.pass == Pass::kBackward ? PlanKind::kBackward : PlanKind::kVocabChunks;
}

class ReferencePlan final : public BackendPlan {
 public:
  ReferencePlan(const Problem& problem, const ParallelFor& pool) : problem_(problem), pool_(pool) {}
  void run(const Buffers& buffers, Workspace workspace, void* /*stream*/,
           const Communicator* group) const override {
    Scratch scratch = lay_out(problem_, pool_.threads, workspace, buffers.screen_weight);
    scratch.seed = seed_of(problem_, buffers);
    if (problem_.is_sparsified() && problem_.has.saved && problem_.tokens > 0) {
      auto* kept_seed = static_cast<int64_t*>(buffers.saved);
      if (problem_.pass == Pass::kForward) *kept_seed = scratch.seed;
      scratch.seed = *kept_seed;
    }
    const int64_t count = compact_rows(problem_, buffers.targets, scratch.rows.data());
    const HostLoss context = make_host_loss(problem_, buffers, scratch.rows.data(), count);
    if (problem_.rounds_rows()) find_exponents(problem_, buffers, scratch);
    if (problem_.needs_forward()) forward(problem_, context, scratch, count, pool_, group);
    if (problem_.needs_backward()) backward(problem_, context, scratch, count, pool_);
  }

 private:
  const Problem problem_;
  const ParallelFor pool_;
};

std::vector<Plan> plans(const Problem& problem, const BackendOptions& options, uint64_t) {
  Plan plan;
  plan.kind = kind_of(problem);
  plan.threads = options.parallel_for.threads;
  Workspace counter;
  lay_out(problem, plan.threads, counter);
  plan.workspace_bytes = counter.used();
  // The seed, from which draws are made again.
  if (problem.is_sparsified() && problem.has.saved) plan.saved_bytes = kWorkspaceAlignment;
  plan.screen_weight_bytes = host_screen_weight_bytes(problem);
  plan.cost_matmuls = (problem.needs_forward() ? 1 : 0) + (problem.has.d_hidden ? 2 : 0) +
                      (problem.has.d_weight || problem.has.d_bias ? 2 : 0);
  constexpr double kFlopPerSecond = 1e9;  // a scalar loop; the order of magnitude is enough
  plan.predicted_seconds = plan.cost_matmuls * gemm_flop(problem) / kFlopPerSecond / plan.threads;
  plan.engine = "scalar";
  plan.reason = problem.dtype.hidden == DType::kF64 ? "float64 operands" : "requested";
  plan.config = "float64";
  count_gathers(problem, DType::kF64, std::max<int64_t>(problem.tokens, 1), &plan);
  plan.backend_plan = std::make_shared<ReferencePlan>(problem, options.parallel_for);
  return {plan};
}

}  // namespace

const Backend& backend() {
  static const Backend kBackend{.name = "reference",
                                .device_memory = false,
                                .why_unavailable = why_unavailable,
                                .describe = describe,
                                .why_unsupported = why_unsupported,
                                .plans = plans,
                                .scale = scale_on_host,
                                .divergence = divergence,
                                .candidates_bytes = candidates_bytes,
                                .candidates = candidates,
                                .noise = noise_on_host,
                                .devices = nullptr};
  return kBackend;
}

}  // namespace logitless::reference
