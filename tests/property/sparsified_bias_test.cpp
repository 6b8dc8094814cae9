// Sparsified gradients are unbiased: the mean over many seeds approaches the exact gradient as it should.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "sparsified_fixture.h"

namespace logitless_test {
namespace {

constexpr int64_t kSeeds = 1000;

// A bound of the mean of that many squared normal variables (chi^2), 5 standard deviations up: it is exceeded
// with probability 3e-7 (Wilson and Hilferty).
double largest_chi_square_mean(double degrees) {
  const double v = 2 / (9 * degrees);
  return std::pow(1 - v + 5 * std::sqrt(v), 3);
}

class SparsifiedBias : public SparsifiedTest {
 protected:
  // Compares the mean of one gradient with the truth, after all seeds and after the first of them.
  // bound: the error of exact arithmetic.
  // degrees: independent components, at least.
  static void expect_unbiased(const char* what, const Sums& sums, const Sums& early,
                              const std::vector<double>& truth, double bound, double degrees) {
    ASSERT_EQ(sums.sum.size(), truth.size()) << what;
    double widest = 0;
    for (size_t i = 0; i < truth.size(); ++i) widest = std::max(widest, sums.range(i));
    for (size_t i = 0; i < truth.size(); ++i) {
      // 5.5 standard deviations of a normal variable, 4e-8. Where few seeds drew anything, the mean has the
      // tail of a Poisson variable instead (Bernstein's bound, of the same chance).
      // The bound needs the range of all that could be drawn, which a component's own few draws do not show.
      // So it takes the widest range of any component.
      constexpr double kDeviations = 5.5;
      const double allowed = kDeviations * std::sqrt(sums.variance(i)) +
                             kDeviations * kDeviations / 2 * widest / (3 * static_cast<double>(sums.seeds)) +
                             bound;
      EXPECT_LE(std::fabs(sums.mean(i) - truth[i]), allowed)
          << what << "[" << i << "]: mean " << sums.mean(i) << ", exact " << truth[i];
    }
    // The squared distance falls as 1 / seeds.
    for (const Sums* s : {&early, &sums}) {
      double distance = 0;
      double expected = 0;
      for (size_t i = 0; i < truth.size(); ++i) {
        distance += std::pow(s->mean(i) - truth[i], 2);
        expected += sums.variance(i) * static_cast<double>(sums.seeds) / static_cast<double>(s->seeds) +
                    bound * bound;
      }
      EXPECT_LE(distance, expected * largest_chi_square_mean(degrees)) << what << " after " << s->seeds;
    }
  }

  void check(const Case& c, const std::function<Outputs(int64_t seed)>& draw) const {
    const Expected expected(c);
    const Answer& truth = expected.truth();
    const Bounds bounds = expected.bounds_of(engine());
    struct {
      const char* name;
      std::vector<double> Outputs::*got;
      const std::vector<double>& truth;
      double bound;
      Sums sums = {}, early = {};
    } gradients[] = {{"d_hidden", &Outputs::d_hidden, truth.d_hidden, bounds.d_hidden},
                     {"d_weight", &Outputs::d_weight, truth.d_weight, bounds.d_weight},
                     {"d_bias", &Outputs::d_bias, truth.d_bias, bounds.d_bias}};
    for (int64_t seed = 0; seed < kSeeds; ++seed) {
      const Outputs got = draw(seed);
      for (auto& each : gradients) {
        if (seed == kSeeds / 16) each.early = each.sums;
        each.sums.add(got.*each.got);
      }
    }
    // Rows are drawn independently of each other; some may have next to no variance.
    const double degrees = static_cast<double>(c.problem.tokens) / 2;
    for (const auto& each : gradients) {
      expect_unbiased(each.name, each.sums, each.early, each.truth, each.bound, degrees);
    }
  }

  // A case with gradients in float32, so that a rounding to their dtype is no bias of the mean.
  Case base(uint64_t seed, double scale) const {
    const bool slow = engine().is_reference();
    Case c = sparsified(slow ? PlainSize{12, 50, 4} : PlainSize{12, 500, 4}, slow ? 0x1p-4 : 0x1p-6, seed);
    c.problem.scale = scale;
    return c;
  }

  // Adds every option that goes with the rest, and upstream gradients of all outputs.
  static void add_options(Case* c) {
    logitless::Problem& p = c->problem;
    Random random(77);
    const auto uniform = [&](int64_t count, double low, double high) {
      return uniform_values(random, count, low, high, LOGITLESS_F32);
    };
    p.has.class_weight = p.has.token_weight = p.has.temperature = p.has.entropy = 1;
    p.has.grad_nll = p.has.grad_lse = p.has.grad_entropy = 1;
    p.z_loss = 0.01;
    c->class_weight = uniform(p.vocab, 0.5, 2);
    c->token_weight = uniform(p.tokens, 0.5, 2);
    c->temperature = uniform(p.tokens, 0.4, 2);
    c->grad_nll = uniform(p.tokens, -1, 1);
    c->grad_lse = uniform(p.tokens, -1, 1);
    c->grad_entropy = uniform(p.tokens, -1, 1);
    c->targets[3] = p.ignore_index;
    c->mode = Mode::kForwardThenBackward;
  }

  std::function<Outputs(int64_t)> whole(const Case& c) const {
    return [this, &c](int64_t seed) {
      Case t = c;
      t.problem.seed = seed;
      return solve(t);
    };
  }
};

TEST_P(SparsifiedBias, Plain) {
  for (double scale : {0.25, 1.0, 3.0}) {
    SCOPED_TRACE(scale);
    const Case c = base(31, scale);
    check(c, whole(c));
  }
}

TEST_P(SparsifiedBias, Temperature) {
  Case c = base(36, 1);
  c.problem.temperature = 0.7;
  c.problem.softcap = 4;
  check(c, whole(c));
}

// Behind a screen, weights are ratios of two random numbers. Their bias is below their squared relative
// error, of which the check allows three times the rounding bounds: those of 2^-6 and 8-bit logits off by 0.1
// are 1e-4 of a gradient.
TEST_P(SparsifiedBias, Screen) {
  if (!why_not_screened().empty()) GTEST_SKIP() << why_not_screened();
  for (double scale : {0.25, 1.0, 3.0}) {
    SCOPED_TRACE(scale);
    Case c = base(31, scale);
    c.problem.screen = LOGITLESS_SCREEN_FP8;
    check(c, whole(c));
  }
}

TEST_P(SparsifiedBias, Smoothing) {
  Case c = base(32, 1);
  add_options(&c);
  c.problem.label_smoothing = 0.3;
  check(c, whole(c));
}

TEST_P(SparsifiedBias, SoftcapAndKeptDraws) {
  Case c = base(33, 2);
  add_options(&c);
  c.problem.softcap = 3;
  c.problem.has.saved = 1;
  check(c, whole(c));
}

// Nearly every row keeps an element of some columns; CUDA's kernels leave these columns to products.
TEST_P(SparsifiedBias, ColumnsThatManyRowsKeep) {
  if (!is_device()) GTEST_SKIP() << "no column is special there";
  Case c = sparsified({64, 1400, 4}, 0x1p-6, 35);
  c.problem.has.saved = 1;
  c.mode = Mode::kForwardThenBackward;
  for (size_t k = 0; k < 8; ++k) c.bias[100 + 50 * k] = k % 2 == 0 ? 5 : 3.3;
  for (int64_t& target : c.targets) target = 600 + target % 800;
  check(c, whole(c));
}

// Each shard draws with its own seed and its own lse estimates; lse is that of all shards.
TEST_P(SparsifiedBias, Shards) {
  for (int32_t keeps : {0, 1}) {
    Case c = base(34, 1);
    add_options(&c);
    c.problem.label_smoothing = 0.1;
    c.problem.has.saved = keeps;
    logitless::Problem forward = pass_problem(c, logitless::Pass::forward);
    forward.has.saved = 0;
    const Outputs whole_vocabulary = run_pass(context_, forward, c);
    const int64_t half = c.problem.vocab / 3;
    check(c, [&](int64_t seed) {
      Outputs out;
      for (int shard = 0; shard < 2; ++shard) {
        const auto cut = [&](logitless::Pass pass) {
          logitless::Problem p = pass_problem(c, pass);
          p.seed = seed;
          p.vocab_total = p.vocab;
          p.vocab_start = shard == 0 ? 0 : half;
          p.vocab = shard == 0 ? half : p.vocab - half;
          return p;
        };
        Outputs known = whole_vocabulary;
        if (keeps != 0) known.saved = run_pass(context_, cut(logitless::Pass::forward), c).saved;
        const Outputs one = run_pass(context_, cut(logitless::Pass::backward), c, &known);
        if (shard == 0) out.d_hidden.assign(one.d_hidden.size(), 0);
        for (size_t i = 0; i < one.d_hidden.size(); ++i) out.d_hidden[i] += one.d_hidden[i];
        out.d_weight.insert(out.d_weight.end(), one.d_weight.begin(), one.d_weight.end());
        out.d_bias.insert(out.d_bias.end(), one.d_bias.begin(), one.d_bias.end());
      }
      return out;
    });
  }
}

LOGITLESS_TEST_ON(SparsifiedBias, engines());

}  // namespace
}  // namespace logitless_test
