#include "compare.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "formats.h"

namespace logitless_test {
namespace {

// The error of double arithmetic relative to the terms of a sum: far below every output's rounding.
constexpr double kDoubleArithmetic = 1e-12;

double largest_error(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::fabs(a[i] - b[i]));
  return largest;
}

// A number that is compared. `wanted` is the tensor that a plan needs for it. `dtype` is its own dtype, else
// that of statistics.
struct Compared {
  const char* name;
  std::vector<double> Outputs::*got;
  std::vector<double> Answer::*truth;
  double Bounds::*bound;
  bool logitless::Problem::Has::*wanted = nullptr;
  int32_t logitless::Problem::Dtypes::*dtype = nullptr;

  logitless_dtype dtype_of(const logitless::Problem& p) const {
    return dtype == nullptr ? stats_dtype(p) : as_dtype(p.dtype.*dtype);
  }
};
#define LOGITLESS_COMPARED(name, bound) #name, &Outputs::name, &Answer::name, &Bounds::bound
#define LOGITLESS_GRADIENT(name) \
  { LOGITLESS_COMPARED(name, name), nullptr, &logitless::Problem::Dtypes::name }
constexpr Compared kCompared[] = {
    {LOGITLESS_COMPARED(lse, lse)},
    {LOGITLESS_COMPARED(nll, nll)},
    {LOGITLESS_COMPARED(entropy, entropy), &logitless::Problem::Has::entropy},
    {LOGITLESS_COMPARED(target_logit, logit)},
    {LOGITLESS_COMPARED(max_logit, logit)},
    {LOGITLESS_COMPARED(mean_logit, mean_logit), &logitless::Problem::Has::mean_logit},
    {LOGITLESS_COMPARED(log_sum_sq_probs, log_sum_sq_probs), &logitless::Problem::Has::log_sum_sq_probs},
    {LOGITLESS_COMPARED(loss, loss)},
    LOGITLESS_GRADIENT(d_hidden),
    LOGITLESS_GRADIENT(d_weight),
    LOGITLESS_GRADIENT(d_bias),
};
#undef LOGITLESS_GRADIENT
#undef LOGITLESS_COMPARED

// The factor by which the error of a sum over several targets is larger.
double times_of(const Compared& each, double target_weight) {
  return each.got == &Outputs::target_logit ? target_weight : 1;
}

Answer true_answer(const Case& c) {
  return c.problem.dtype.hidden == LOGITLESS_F64 ? materialise<long double>(c) : materialise<double>(c);
}

Answer naive_answer(const Case& c) {
  return c.problem.dtype.hidden == LOGITLESS_F64 ? materialise<double>(c) : materialise<float>(c);
}

}  // namespace

bool is_close(double got, double expected, double error, logitless_dtype dtype) {
  if (got == expected || (std::isnan(got) && std::isnan(expected))) return true;
  const double bound = error + rounding_unit(dtype) * std::fabs(expected) + subnormal_unit(dtype);
  return std::fabs(got - expected) <= bound || rounded(expected, dtype) == got;
}

testing::AssertionResult close(const char* what, const std::vector<double>& got,
                               const std::vector<double>& expected, double error, logitless_dtype dtype) {
  if (got.size() != expected.size()) {
    return testing::AssertionFailure()
           << what << ": " << got.size() << " elements instead of " << expected.size();
  }
  for (size_t i = 0; i < got.size(); ++i) {
    if (is_close(got[i], expected[i], error, dtype)) continue;
    return testing::AssertionFailure()
           << what << "[" << i << "] = " << got[i] << " instead of " << expected[i] << ", off by "
           << std::fabs(got[i] - expected[i]) << ", allowed " << error << " and a rounding";
  }
  return testing::AssertionSuccess();
}

Bounds operator*(double factor, const Bounds& b) {
  Bounds out;
  for (const auto each : kBounds) out.*each = factor * b.*each;
  return out;
}

Bounds operator+(const Bounds& a, const Bounds& b) {
  Bounds out;
  for (const auto each : kBounds) out.*each = a.*each + b.*each;
  return out;
}

Bounds either(const Bounds& a, const Bounds& b) {
  Bounds out;
  for (const auto each : kBounds) out.*each = std::max(a.*each, b.*each);
  return out;
}

Expected::Expected(const Case& c) : c_(c), truth_(true_answer(c)), naive_(naive_answer(c)) {
  static const bool kOnDevice = !device_engines().empty();
  if (!Engine::has_short_operands(c.problem)) return;
  const bool bf16 = product_dtype(c.problem, c.problem.dtype.hidden) == LOGITLESS_BF16;
  if (bf16 || kOnDevice) naive_short_ = materialise<float>(c, Rounds::kGradients);
  if (bf16 && kOnDevice) naive_exp_logits_ = materialise<float>(c, Rounds::kExpLogits);
}

Arithmetic Expected::arithmetic_of(const Engine& engine) const {
  const logitless::Problem& p = c_.problem;
  Arithmetic out;
  const bool is_short = engine.shortens_gradients(p);
  out.gradient = rounding_unit(is_short ? product_dtype(p, p.dtype.hidden) : stats_dtype(p));
  if (p.has.temperature != 0 || p.temperature != 1) out.logit_roundings += 2;  // inverse and product
  if (stats_dtype(p) == LOGITLESS_F64) out.exp = 0x1p-52;  // exp and log are off by one unit
  if (!engine.is_device()) return out;
  if (stats_dtype(p) == LOGITLESS_F64) {
    if (p.softcap > 0) out.logit_roundings += 4;  // tanh is off by two
    return out;
  }
  out.exp = 0x1p-23;  // expf
  // A matrix instruction of 16-bit operands adds 16 products to its sum at a time (8 before compute
  // capability 9.0). It cuts off what is over, which is twice the error of a rounding.
  const double at_a_time = engine.engine == "mma" ? 8 : 16;
  if (is_short) out.logit_roundings += 2 * std::ceil(static_cast<double>(p.hidden) / at_a_time);
#ifndef LOGITLESS_CUDA_ON_CPU
  // One of e4m3 numbers adds 32, and cuts off what each and the sum have below 2^-13 of the largest.
  if (p.compute_dtype == LOGITLESS_FP8 && engine.engine == "sm90") {
    out.logit_roundings += 33 * 0x1p11 * std::ceil(static_cast<double>(p.hidden) / 32);
  }
#endif
  if (engine.is_fused()) {
    out.exp = 0x1p-22;         // ex2.approx
    out.logit_roundings += 3;  // to base 2: roundings of log2(e), the scale and the logit offset times it
    // The softcap as cap - 2 cap / (1 + 2^x): near 0 its error is 2.5 x 2^-23 cap, from 2^x, the sum and the
    // reciprocal.
    if (p.softcap > 0 && truth_.terms.logit > 0) {
      double least = p.temperature;
      for (double t : c_.temperature) least = std::min(least, t);
      out.logit_roundings += 5 * p.softcap / least / truth_.terms.logit;
    }
  }
  return out;
}

Bounds Expected::bounds(const Answer& naive, const Arithmetic& arithmetic) const {
  const Answer& t = truth_;
  const double unit = rounding_unit(stats_dtype(c_.problem)) * arithmetic.logit_roundings;
  const auto bound = [&](const std::vector<double>& got, const std::vector<double>& truth, double term) {
    return 2 * largest_error(got, truth) + unit * term;
  };
  const auto gradient = [&](const std::vector<double>& got, const std::vector<double>& truth,
                            const Answer::Terms::Gradient& term) {
    return bound(got, truth, term.by_logit) + (arithmetic.gradient + arithmetic.exp) * term.part;
  };
  Bounds out;
  out.logit = bound(naive.logits, t.logits, t.terms.logit);
  out.lse = bound(naive.lse, t.lse, t.terms.logit) + arithmetic.exp;
  // nll is max - z_y plus the log of a sum of at most V exp logits.
  const double nll_terms = 2 * t.terms.logit + std::log(static_cast<double>(c_.problem.vocab));
  out.nll =
      bound(naive.nll, t.nll, nll_terms * t.terms.target_weight) + arithmetic.exp * t.terms.target_weight;
  out.entropy = bound(naive.entropy, t.entropy, t.terms.entropy) + arithmetic.exp * t.terms.entropy;
  out.mean_logit = bound(naive.mean_logit, t.mean_logit, t.terms.logit);
  // Logits enter it with the weights 2 q and 2 p, q = p^2 / sum p^2, and so do the exp logits' own errors.
  // Each of its two logs is at most 2 log V.
  const double log_terms = 4 * t.terms.logit + 4 * std::log(static_cast<double>(c_.problem.vocab));
  out.log_sum_sq_probs = bound(naive.log_sum_sq_probs, t.log_sum_sq_probs, log_terms) + 4 * arithmetic.exp;
  out.d_hidden = gradient(naive.d_hidden, t.d_hidden, t.terms.d_hidden);
  out.d_weight = gradient(naive.d_weight, t.d_weight, t.terms.d_weight);
  out.d_bias = gradient(naive.d_bias, t.d_bias, t.terms.d_bias);
  if (c_.problem.reduction == LOGITLESS_REDUCTION_NONE) {
    out.loss = bound(naive.row_loss, t.row_loss, t.terms.row_loss) + 2 * arithmetic.exp * t.terms.row_loss;
    return out;
  }
  // The loss is a sum: the rows' errors add up, and each addition rounds once, in double.
  const double summing = rounding_unit(LOGITLESS_F64) * static_cast<double>(t.row_loss.size());
  for (size_t i = 0; i < t.row_loss.size(); ++i) {
    out.loss += 2 * std::fabs(naive.row_loss[i] - t.row_loss[i]) +
                (unit + 2 * arithmetic.exp) * t.terms.loss[i] + summing * std::fabs(t.row_loss[i]);
  }
  out.loss = t.divisor == 0 ? 0 : out.loss / std::fabs(t.divisor);
  return out;
}

Bounds Expected::bounds_of_double() const {
  const Answer::Terms& terms = truth_.terms;
  const auto gradient = [](const Answer::Terms::Gradient& term) { return term.part + term.by_logit; };
  double loss = terms.row_loss;
  if (c_.problem.reduction != LOGITLESS_REDUCTION_NONE) {
    loss = 0;
    for (double term : terms.loss) loss += truth_.divisor == 0 ? 0 : term / std::fabs(truth_.divisor);
  }
  return kDoubleArithmetic * Bounds{.lse = terms.logit,
                                    .nll = 2 * terms.logit * terms.target_weight,
                                    .entropy = terms.entropy,
                                    .logit = terms.logit,
                                    .mean_logit = terms.logit,
                                    .log_sum_sq_probs = 4 * terms.logit + 4,
                                    .loss = loss,
                                    .d_hidden = gradient(terms.d_hidden),
                                    .d_weight = gradient(terms.d_weight),
                                    .d_bias = gradient(terms.d_bias)};
}

Bounds Expected::bounds_of(const Engine& engine) const {
  const Arithmetic arithmetic = arithmetic_of(engine);
  if (!engine.shortens_gradients(c_.problem)) return bounds(naive_, arithmetic);
  const Bounds out = bounds(naive_short_, arithmetic);
  const bool may_keep_exp_logits =
      engine.is_device() && product_dtype(c_.problem, c_.problem.dtype.hidden) == LOGITLESS_BF16;
  const bool keeps = c_.mode == Mode::kForwardBackward || c_.problem.saved_bytes > 0;
  if (!may_keep_exp_logits || !keeps) return out;
  Bounds kept = bounds(naive_exp_logits_, arithmetic);
  kept.d_weight += arithmetic.gradient * truth_.terms.d_weight.part;  // each of its terms is rounded twice
  return either(out, kept);
}

Bounds Expected::tightest_bounds_of(const Engine& engine) const {
  const Bounds rounded_statistics = bounds_of(engine);
  if (!engine.is_reference() || c_.problem.dtype.hidden == LOGITLESS_F64) return rounded_statistics;
  Bounds exact = bounds_of_double();
  if (c_.mode != Mode::kForwardThenBackward) return exact;
  exact.d_hidden = rounded_statistics.d_hidden;
  exact.d_weight = rounded_statistics.d_weight;
  exact.d_bias = rounded_statistics.d_bias;
  return exact;
}

void Expected::check(const Outputs& got, const Bounds& bounds) const {
  SCOPED_TRACE(describe(c_));
  const logitless::Problem& p = c_.problem;
  for (const Compared& each : kCompared) {
    if (each.wanted != nullptr && !(p.has.*each.wanted)) continue;
    if (p.screen != LOGITLESS_SCREEN_NONE && each.got == &Outputs::max_logit) continue;  // there is none
    const double bound = bounds.*each.bound * times_of(each, truth_.terms.target_weight);
    EXPECT_TRUE(close(each.name, got.*each.got, truth_.*each.truth, bound, each.dtype_of(p)));
  }
  EXPECT_EQ(got.valid_count, std::vector<double>{static_cast<double>(truth_.valid_count)});
  if (!got.invalid_targets.empty()) {
    EXPECT_EQ(got.invalid_targets, (std::vector<double>{0, -1}));
  }
  if (p.has.argmax) check_argmax(got, bounds.logit);
  if (!got.top_ids.empty()) check_top(got, bounds);
  if (p.targets_per_row > 0) check_target_log_probs(got, bounds.logit + bounds.lse);
}

// The argmax has a largest logit, up to the logits' own errors, and the count fits to it.
void Expected::check_argmax(const Outputs& got, double logit_error) const {
  double correct = 0;
  ASSERT_EQ(got.argmax.size(), truth_.argmax.size());
  const bool has_one_target = c_.problem.targets_per_row == 0;
  ASSERT_EQ(got.is_top1.size(), has_one_target ? truth_.argmax.size() : 0);
  for (size_t i = 0; i < truth_.argmax.size(); ++i) {
    const auto best = static_cast<int64_t>(got.argmax[i]);
    const bool is_top1 = truth_.argmax[i] >= 0 && best == c_.target_of(static_cast<int64_t>(i));
    if (has_one_target) {
      EXPECT_EQ(got.is_top1[i], is_top1 ? 1 : 0) << "is_top1[" << i << "]";
    }
    if (truth_.argmax[i] < 0 || best < 0 || best >= c_.problem.vocab) {
      EXPECT_EQ(best, truth_.argmax[i]) << "argmax[" << i << "]";
      continue;
    }
    const double* logits = truth_.logits.data() + i * static_cast<size_t>(c_.problem.vocab);
    EXPECT_GE(logits[best], logits[truth_.argmax[i]] - 2 * logit_error) << "argmax[" << i << "] = " << best;
    if (best == c_.target_of(static_cast<int64_t>(i))) ++correct;
  }
  if (has_one_target) {
    EXPECT_EQ(got.correct_count, std::vector<double>{correct});
  }
}

void Expected::check_target_log_probs(const Outputs& got, double error) const {
  std::vector<double> expected;
  for (int64_t i = 0; i < c_.problem.tokens; ++i) {
    for (int64_t k = 0; k < c_.problem.targets_per_row; ++k) {
      const int64_t y = c_.target_of(i, k);
      const bool is_none = y == c_.problem.ignore_index;
      const double z = is_none ? 0 : truth_.logits[static_cast<size_t>(i * c_.problem.vocab + y)];
      expected.push_back(is_none ? 0 : z - truth_.lse[static_cast<size_t>(i)]);
    }
  }
  EXPECT_TRUE(close("target_log_probs", got.target_log_probs, expected, error, stats_dtype(c_.problem)));
}

// Where every logit is off by less than an error, so is the r-th largest logit. The logit of the id in that
// place is off by twice as much.
void Expected::check_top(const Outputs& got, const Bounds& bounds) const {
  const logitless::Problem& p = c_.problem;
  const auto k = static_cast<size_t>(p.top_k), vocab = static_cast<size_t>(p.vocab);
  ASSERT_EQ(got.top_ids.size(), static_cast<size_t>(p.tokens) * k);
  std::vector<double> log_probs;
  for (size_t i = 0; i < static_cast<size_t>(p.tokens); ++i) {
    const double* logits = truth_.logits.data() + i * vocab;
    std::vector<double> sorted(logits, logits + vocab);
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    std::set<double> seen;
    for (size_t r = 0; r < k; ++r) {
      const double id = got.top_ids[i * k + r];
      const std::string place = "top_ids[" + std::to_string(i) + ", " + std::to_string(r) + "]";
      if (truth_.argmax[i] < 0) {
        EXPECT_EQ(id, -1) << place;
        log_probs.push_back(0);
        continue;
      }
      ASSERT_TRUE(id >= 0 && id < static_cast<double>(vocab) && seen.insert(id).second)
          << place << " = " << id;
      const double z = logits[static_cast<size_t>(id)];
      EXPECT_TRUE(z == sorted[r] || std::fabs(z - sorted[r]) <= 2 * bounds.logit) << place << " = " << id;
      log_probs.push_back(z - truth_.lse[i]);
      if (r > 0) {
        EXPECT_LE(got.top_log_probs[i * k + r], got.top_log_probs[i * k + r - 1]) << place;
      }
    }
  }
  EXPECT_TRUE(
      close("top_log_probs", got.top_log_probs, log_probs, bounds.logit + bounds.lse, stats_dtype(p)));
}

namespace {

double largest_target_weight(const Case& c) {
  double largest = 0;
  for (int64_t i = 0; i < c.problem.tokens; ++i) {
    double sum = 0;
    for (int64_t k = 0; k < c.targets_per_row(); ++k) sum += std::fabs(c.target_weight_of(i, k));
    largest = std::max(largest, sum);
  }
  return largest;
}

}  // namespace

void expect_same_results(const Case& c, const Outputs& a, const Outputs& b, const Bounds& bounds) {
  SCOPED_TRACE(describe(c));
  const logitless::Problem& p = c.problem;
  const double target_weight = p.targets_per_row > 0 ? largest_target_weight(c) : 1;
  for (const Compared& each : kCompared) {
    const std::vector<double>&x = a.*each.got, &y = b.*each.got;
    const logitless_dtype dtype = each.dtype_of(p);
    // Each of the two was rounded to its output's dtype: close() allows one rounding, so a second is added.
    double largest = 0;
    for (double value : y) largest = std::max(largest, std::fabs(value));
    const double second = rounding_unit(dtype) * largest + subnormal_unit(dtype);
    EXPECT_TRUE(close(each.name, x, y, bounds.*each.bound * times_of(each, target_weight) + second, dtype));
  }
}

}  // namespace logitless_test
