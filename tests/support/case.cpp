#include "case.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "formats.h"

namespace logitless_test {
namespace {

// Chooses one temperature for all rows, or a different one for each.
void choose_temperature(Random& random, Case* c) {
  logitless::Problem& p = c->problem;
  if (random.chance(0.2)) {
    p.temperature = random.pick<double>({0.1, 0.7, 2.5});
  } else if (random.chance(0.3)) {
    p.has.temperature = 1;
    for (int64_t row = 0; row < p.tokens; ++row) {
      c->temperature.push_back(
          rounded(std::exp(random.uniform(std::log(0.1), std::log(10.0))), stats_dtype(p)));
    }
  }
}

// Chooses further statistics. They are drawn last, so that a seed's case is otherwise the one without them.
void choose_statistics(Random& random, Case* c) {
  logitless::Problem& p = c->problem;
  p.has.mean_logit = random.chance(0.4);
  p.has.log_sum_sq_probs = random.chance(0.4);
  if (c->mode != Mode::kForwardThenBackward || random.chance(0.6)) return;
  p.has.grad_target_logit = 1;
  c->grad_target_logit = uniform_values(random, p.tokens, -1, 1, stats_dtype(p));
}

// Weights in [0, 2], some of them exactly 0.
std::vector<double> weights(Random& random, int64_t count, logitless_dtype dtype) {
  std::vector<double> out = uniform_values(random, count, 0, 2, dtype);
  for (double& value : out) {
    if (random.chance(0.1)) value = 0;
  }
  return out;
}

// Draws a small dimension, one around the blocks of the kernels, or any between.
int64_t random_dimension(Random& random, int64_t largest) {
  if (random.chance(0.4)) {
    return std::min(largest, random.pick<int64_t>({1,   2,   3,   6,   7,   8,   13,  14,  15,  16,
                                                   17,  31,  32,  33,  64,  65,  96,  127, 128, 129,
                                                   251, 252, 253, 255, 256, 257, 511, 512, 513, 1031}));
  }
  return static_cast<int64_t>(std::exp(random.uniform(0, std::log(static_cast<double>(largest) + 0.99))));
}

void choose_shape(Random& random, const CaseLimits& limits, logitless::Problem* p) {
  do {
    p->tokens = random_dimension(random, limits.largest_dimension);
    p->vocab = random_dimension(random, limits.largest_dimension);
    p->hidden = random_dimension(random, limits.largest_dimension);
  } while (p->tokens * p->vocab * p->hidden > limits.most_products);
}

void choose_dtypes(Random& random, const CaseLimits& limits, logitless::Problem* p) {
  if (limits.only_fp64 || (limits.allow_fp64 && random.chance(0.1))) {
    for (int32_t* dtype : {&p->dtype.hidden, &p->dtype.weight, &p->dtype.bias, &p->dtype.d_hidden,
                           &p->dtype.d_weight, &p->dtype.d_bias}) {
      *dtype = LOGITLESS_F64;
    }
    return;
  }
  const auto pick = [&] { return random.pick<int32_t>({LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}); };
  p->dtype.hidden = pick();
  p->dtype.weight = random.chance(0.6) ? p->dtype.hidden : pick();
  p->dtype.bias = random.chance(0.6) ? p->dtype.weight : pick();
  p->dtype.d_hidden = random.chance(0.5) ? p->dtype.hidden : pick();
  p->dtype.d_weight = random.chance(0.5) ? p->dtype.weight : pick();
  p->dtype.d_bias = random.chance(0.5) ? p->dtype.bias : pick();
}

void choose_loss(Random& random, logitless::Problem* p) {
  p->reduction =
      random.pick<int32_t>({LOGITLESS_REDUCTION_NONE, LOGITLESS_REDUCTION_SUM, LOGITLESS_REDUCTION_MEAN});
  p->has.bias = random.chance(0.5);
  p->has.class_weight = random.chance(0.3);
  p->has.token_weight = random.chance(0.3);
  if (random.chance(0.3)) p->scale = random.pick<double>({0.125, -1.0, 2.5, 0.0});
  if (random.chance(0.3)) p->softcap = random.pick<double>({0.5, 5.0, 30.0});
  if (random.chance(0.4)) p->label_smoothing = random.pick<double>({0.1, 0.5, 1.0});
  if (random.chance(0.3)) p->z_loss = random.pick<double>({1e-4, 0.1});
  if (p->reduction == LOGITLESS_REDUCTION_MEAN && random.chance(0.4)) p->num_items = random.uniform(1, 50);
  p->ignore_index = random.pick<int64_t>({-100, -100, -1, 0, p->vocab - 1, 1'000'000});
  p->dtype.targets = random.pick<int32_t>({LOGITLESS_I32, LOGITLESS_I64});
  if (random.chance(0.3)) {
    std::vector<int64_t> divisors;
    for (int64_t d = 1; d <= p->tokens; ++d) {
      if (p->tokens % d == 0) divisors.push_back(d);
    }
    p->sequence_length =
        divisors[static_cast<size_t>(random.integer(0, static_cast<int64_t>(divisors.size()) - 1))];
    p->shift = random.integer(0, random.chance(0.9) ? 3 : p->sequence_length + 1);
  } else if (random.chance(0.2)) {
    p->shift = random.integer(1, 3);
  }
}

void choose_outputs(Random& random, Case* c) {
  logitless::Problem& p = c->problem;
  p.has.entropy = random.chance(0.5);
  p.has.argmax = random.chance(0.5);
  c->mode = random.chance(0.15) ? Mode::kForward
                                : random.pick<Mode>({Mode::kForwardBackward, Mode::kForwardThenBackward});
  if (c->mode == Mode::kForward) return;
  do {
    p.has.d_hidden = random.chance(0.75);
    p.has.d_weight = random.chance(0.75);
    p.has.d_bias = p.has.bias != 0 && random.chance(0.6);
  } while (!c->wants_gradients());
  if (c->mode == Mode::kForwardThenBackward) {
    p.has.grad_nll = random.chance(0.4);
    p.has.grad_lse = random.chance(0.4);
    p.has.grad_entropy = p.has.entropy != 0 && random.chance(0.6);
  }
  const auto adds = [&](int32_t wanted, int32_t dtype) {
    return wanted != 0 && (dtype == LOGITLESS_F32 || dtype == LOGITLESS_F64) && random.chance(0.4);
  };
  p.accumulate.d_hidden = adds(p.has.d_hidden, p.dtype.d_hidden);
  p.accumulate.d_weight = adds(p.has.d_weight, p.dtype.d_weight);
  p.accumulate.d_bias = adds(p.has.d_bias, p.dtype.d_bias);
}

void draw_targets(Random& random, Case* c) {
  const logitless::Problem& p = c->problem;
  const double ignored = random.pick<double>({0.0, 0.0, 0.3, 0.95, 1.0});
  for (int64_t row = 0; row < p.tokens; ++row) {
    c->targets.push_back(random.chance(ignored) ? p.ignore_index : random.integer(0, p.vocab - 1));
  }
}

void draw_values(Random& random, Case* c) {
  const logitless::Problem& p = c->problem;
  const logitless_dtype stats = stats_dtype(p);
  const double logit_deviation = random.pick<double>({0.1, 1.0, 4.0});
  c->hidden = normal_values(random, p.tokens * p.hidden, 1, as_dtype(p.dtype.hidden));
  c->weight =
      normal_values(random, p.vocab * p.hidden, logit_deviation / std::sqrt(static_cast<double>(p.hidden)),
                    as_dtype(p.dtype.weight));
  if (p.has.bias) c->bias = normal_values(random, p.vocab, 1, as_dtype(p.dtype.bias));
  if (p.has.class_weight) c->class_weight = weights(random, p.vocab, stats);
  if (p.has.token_weight) c->token_weight = weights(random, p.tokens, stats);
  const bool per_row = p.reduction == LOGITLESS_REDUCTION_NONE;
  const bool must = per_row && c->mode == Mode::kForwardThenBackward;
  if (must || random.chance(0.5)) c->grad_loss = uniform_values(random, per_row ? p.tokens : 1, -1, 2, stats);
  if (p.has.grad_nll) c->grad_nll = uniform_values(random, p.tokens, -1, 1, stats);
  if (p.has.grad_lse) c->grad_lse = uniform_values(random, p.tokens, -1, 1, stats);
  if (p.has.grad_entropy) c->grad_entropy = uniform_values(random, p.tokens, -1, 1, stats);
  if (p.accumulate.d_hidden) c->d_hidden_start = normal_values(random, p.tokens * p.hidden, 1, stats);
  if (p.accumulate.d_weight) c->d_weight_start = normal_values(random, p.vocab * p.hidden, 1, stats);
  if (p.accumulate.d_bias) c->d_bias_start = normal_values(random, p.vocab, 1, stats);
}

}  // namespace

Case saving(Case c) {
  c.mode = Mode::kForwardThenBackward;
  c.problem.has.saved = 1;
  c.problem.saved_bytes = INT64_MAX;
  return c;
}

namespace {

Layout random_layout(Random& random) {
  return {random.pick<int64_t>({0, 0, 1, 5, 64}), random.pick<int64_t>({0, 0, 1, 3})};
}

}  // namespace

logitless_dtype stats_dtype(const logitless::Problem& problem) {
  return problem.dtype.hidden == LOGITLESS_F64 ? LOGITLESS_F64 : LOGITLESS_F32;
}

logitless_dtype product_dtype(const logitless::Problem& problem, int32_t dtype) {
  if (problem.compute_dtype == LOGITLESS_FP8) return LOGITLESS_BF16;
  return as_dtype(problem.compute_dtype != LOGITLESS_F32 ? problem.compute_dtype : dtype);
}

std::vector<double> normal_values(Random& random, int64_t count, double deviation, logitless_dtype dtype) {
  std::vector<double> out(static_cast<size_t>(count));
  for (double& value : out) value = rounded(deviation * random.normal(), dtype);
  return out;
}

std::vector<double> uniform_values(Random& random, int64_t count, double low, double high,
                                   logitless_dtype dtype) {
  std::vector<double> out(static_cast<size_t>(count));
  for (double& value : out) value = rounded(random.uniform(low, high), dtype);
  return out;
}

int64_t Case::target_of(int64_t row, int64_t k) const {
  const int64_t length = problem.sequence_length == 0 ? problem.tokens : problem.sequence_length;
  const int64_t sequence = row / length;
  const int64_t position = row % length + problem.shift;
  if (position >= length) return problem.ignore_index;
  return targets[static_cast<size_t>((sequence * length + position) * targets_per_row() + k)];
}

double Case::target_weight_of(int64_t row, int64_t k) const {
  if (target_of(row, k) == problem.ignore_index) return 0;
  if (target_weight.empty()) return 1;
  return target_weight[static_cast<size_t>((row + problem.shift) * targets_per_row() + k)];
}

int64_t Case::target_of(int64_t row) const {
  for (int64_t k = 0; k < targets_per_row(); ++k) {
    if (target_of(row, k) != problem.ignore_index) return target_of(row, k);
  }
  return problem.ignore_index;
}

void give_targets(Random& random, Case* c, int64_t count, double low, double high) {
  logitless::Problem& p = c->problem;
  p.targets_per_row = count;
  p.has.class_weight = 0;
  c->class_weight.clear();
  std::vector<int64_t> targets;
  for (const int64_t first : c->targets) {
    const bool is_ignored = first == p.ignore_index;
    for (int64_t k = 0; k < count; ++k) {
      const bool is_none = is_ignored || random.chance(0.1);
      const bool comes_again = k > 0 && random.chance(0.1);
      targets.push_back(is_none       ? p.ignore_index
                        : comes_again ? targets.back()
                                      : random.integer(0, p.vocab - 1));
    }
  }
  c->targets = targets;
  c->target_weight = uniform_values(random, static_cast<int64_t>(targets.size()), low, high, stats_dtype(p));
}

Case random_case(uint64_t seed, const CaseLimits& limits) {
  Random random(seed);
  Case c;
  c.seed = seed;
  choose_shape(random, limits, &c.problem);
  choose_dtypes(random, limits, &c.problem);
  choose_loss(random, &c.problem);
  choose_outputs(random, &c);
  draw_targets(random, &c);
  draw_values(random, &c);
  c.hidden_layout = random_layout(random);
  c.weight_layout = random_layout(random);
  c.d_hidden_layout = random_layout(random);
  c.d_weight_layout = random_layout(random);
  c.skew = random.pick<int64_t>({0, 1, 3});
  if (c.problem.dtype.hidden != LOGITLESS_F64 && random.chance(0.25)) {
    c.problem.compute_dtype = random.pick<int32_t>({LOGITLESS_BF16, LOGITLESS_F16});
  }
  choose_temperature(random, &c);
  choose_statistics(random, &c);
  if (random.chance(0.3)) c.problem.top_k = random.integer(1, std::min<int64_t>(64, c.problem.vocab));
  return c;
}

Case plain_case(uint64_t seed, PlainSize size, logitless_dtype dtype) {
  Random random(seed);
  Case c;
  c.seed = seed;
  logitless::Problem& p = c.problem;
  p.tokens = size.tokens;
  p.vocab = size.vocab;
  p.hidden = size.hidden;
  for (int32_t* each : {&p.dtype.hidden, &p.dtype.weight, &p.dtype.bias, &p.dtype.d_hidden, &p.dtype.d_weight,
                        &p.dtype.d_bias}) {
    *each = dtype;
  }
  p.has.bias = p.has.d_hidden = p.has.d_weight = p.has.d_bias = 1;
  for (int64_t row = 0; row < p.tokens; ++row) c.targets.push_back(random.integer(0, p.vocab - 1));
  draw_values(random, &c);
  c.grad_loss.clear();
  return c;
}

Case rows_of(const Case& c, const std::vector<size_t>& rows) {
  const auto tokens = static_cast<size_t>(c.problem.tokens);
  Case out = c;
  out.problem.tokens = static_cast<int64_t>(rows.size());
  out.targets = rows_of(c.targets, tokens, rows);
  for (const auto member :
       {&Case::hidden, &Case::target_weight, &Case::token_weight, &Case::temperature, &Case::grad_nll,
        &Case::grad_lse, &Case::grad_entropy, &Case::grad_target_logit, &Case::d_hidden_start}) {
    out.*member = rows_of(c.*member, tokens, rows);
  }
  if (c.problem.reduction == LOGITLESS_REDUCTION_NONE) out.grad_loss = rows_of(c.grad_loss, tokens, rows);
  return out;
}

std::vector<size_t> shuffled_rows(size_t count, uint64_t seed) {
  Random random(seed);
  std::vector<size_t> rows(count);
  std::iota(rows.begin(), rows.end(), 0);
  for (size_t i = count; i > 1; --i) {
    std::swap(rows[i - 1], rows[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
  }
  return rows;
}

void remove_bias(Case* c) {
  c->problem.has.bias = c->problem.has.d_bias = 0;
  c->bias.clear();
}

std::string describe(const Case& c) {
  const logitless::Problem& p = c.problem;
  const logitless::Problem plain;
  std::ostringstream out;
  out << "seed " << c.seed << ", mode " << static_cast<int>(c.mode);
#define LOGITLESS_OPTION(name, NAME) \
  if (p.name != plain.name) out << ", " #name " " << p.name;
#include <logitless/options.def>
  out << "; with";
#define LOGITLESS_TENSOR(name, ...) \
  if (p.has.name) out << " " #name;
#include <logitless/tensors.def>
  out << "; dtypes";
  for (int32_t dtype :
       {p.dtype.hidden, p.dtype.weight, p.dtype.bias, p.dtype.d_hidden, p.dtype.d_weight, p.dtype.d_bias}) {
    out << " " << name_of(as_dtype(dtype));
  }
  out << "; adds " << p.accumulate.d_hidden << p.accumulate.d_weight << p.accumulate.d_bias << "; rows";
  for (const Layout& l : {c.hidden_layout, c.weight_layout, c.d_hidden_layout, c.d_weight_layout}) {
    out << " +" << l.padding << " at " << l.skew;
  }
  return out.str();
}

void mask_rows(Case* c, double share) {
  Random random(c->seed + 17);
  const logitless::Problem& p = c->problem;
  c->problem.has.sample_mask = 1;
  c->sample_mask.resize(static_cast<size_t>(p.tokens * p.vocab));
  for (char& may : c->sample_mask) may = random.chance(share) ? 1 : 0;
  for (int64_t row = 0; row < p.tokens; ++row) {
    const int64_t target = c->target_of(row);
    if (target != p.ignore_index) c->sample_mask[static_cast<size_t>(row * p.vocab + target)] = 1;
  }
}

}  // namespace logitless_test
