// dL/dz_ij = p_ij (a + b log p_ij) + c w_j - g [j = y], against numerical derivatives of the loss.
#include "core/row_coefficients.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "random.h"

namespace logitless {
namespace {

struct Row {
  std::vector<double> z, w;
  size_t target = 0;
  LossParams<double> params;
  RowWeights<double> weights;
};

RowLoss<double> loss_of(const Row& row) {
  RowStats<double> stats;
  for (size_t j = 0; j < row.z.size(); ++j) {
    RowStats<double> one;
    one.max = row.z[j];
    one.sum_exp = 1;
    one.weight = row.w[j];
    one.logit_sum = row.z[j];
    one.sum_sq = 1;
    one.argmax = static_cast<int64_t>(j);
    if (j == row.target) one.target_logit = row.z[j];
    stats = merge(stats, one);
  }
  return row_loss(row.params, row.weights, stats, static_cast<int64_t>(row.target));
}

double objective(const Row& row, const RowUpstream<double>& u) {
  const RowLoss<double> loss = loss_of(row);
  return u.loss * loss.loss + u.nll * loss.nll + u.lse * loss.lse + u.entropy * loss.entropy +
         u.target_logit * row.z[row.target];
}

TEST(RowCoefficients, AreTheDerivativeOfTheLoss) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    logitless_test::Random random(seed);
    Row row;
    for (int j = 0; j < 7; ++j) {
      row.z.push_back(2 * random.normal());
      row.w.push_back(random.uniform(0, 2));
      row.params.class_weight_sum += row.w.back();
    }
    row.target = static_cast<size_t>(random.integer(0, 6));
    row.params.vocab_total = 7;
    row.params.label_smoothing = random.pick<double>({0, 0.2, 1});
    row.params.z_loss = random.pick<double>({0, 0.3});
    row.weights = {random.uniform(0, 2), row.w[row.target]};
    const RowUpstream<double> upstream = {random.normal(), random.pick<double>({0, 0.7}),
                                          random.pick<double>({0, -0.4}), random.pick<double>({0, 1.3}),
                                          random.pick<double>({0, 0.9})};
    const RowLoss<double> loss = loss_of(row);
    const RowCoefficients<double> k =
        row_coefficients(row.params, row.weights, upstream, loss.lse, loss.entropy);
    for (size_t j = 0; j < row.z.size(); ++j) {
      constexpr double kStep = 1e-5;  // error of the difference: about step^2 and rounding / step
      Row up = row, down = row;
      up.z[j] += kStep;
      down.z[j] -= kStep;
      const double numeric = (objective(up, upstream) - objective(down, upstream)) / (2 * kStep);
      const double analytic = dz_element(k, row.z[j] - loss.lse, row.w[j], j == row.target ? 1 : 0);
      EXPECT_NEAR(analytic, numeric, 1e-8) << "seed " << seed;
    }
  }
}

// Of several targets, of which two are the same.
TEST(RowCoefficients, OfSeveralTargets) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    logitless_test::Random random(seed);
    std::vector<double> z(7), q(7);
    for (double& each : z) each = 2 * random.normal();
    RowWeights<double> weights{random.uniform(0, 2), 1, 0};
    for (const size_t target : {1, 3, 3, 6}) {
      const double weight = random.uniform(-0.5, 1);
      q[target] += weight;
      weights.target_sum += weight;
    }
    LossParams<double> params;
    params.vocab_total = params.class_weight_sum = 7;
    params.label_smoothing = random.pick<double>({0, 0.2});
    const RowUpstream<double> upstream = {random.normal(), random.pick<double>({0, 0.7}), 0, 0,
                                          random.pick<double>({0, 0.9})};
    const auto stats_of = [&](const std::vector<double>& logits) {
      RowStats<double> stats;
      for (const double each : logits) stats.max = std::max(stats.max, each);
      for (size_t j = 0; j < logits.size(); ++j) {
        stats.sum_exp += std::exp(logits[j] - stats.max);
        stats.target_logit += q[j] * logits[j];
        stats.weighted += logits[j] - stats.max;
      }
      return stats;
    };
    const auto objective_of = [&](const std::vector<double>& logits) {
      const RowStats<double> stats = stats_of(logits);
      const RowLoss<double> loss = row_loss(params, weights, stats, 0);
      return upstream.loss * loss.loss + upstream.nll * loss.nll + upstream.target_logit * stats.target_logit;
    };
    const double lse = log_sum_exp(stats_of(z));
    const RowCoefficients<double> k = row_coefficients(params, weights, upstream, lse, 0.0);
    for (size_t j = 0; j < z.size(); ++j) {
      constexpr double kStep = 1e-5;
      std::vector<double> up = z, down = z;
      up[j] += kStep;
      down[j] -= kStep;
      const double numeric = (objective_of(up) - objective_of(down)) / (2 * kStep);
      EXPECT_NEAR(dz_element(k, z[j] - lse, 1.0, q[j]), numeric, 1e-8) << "seed " << seed;
    }
  }
}

// What is told of a row beside its losses.
TEST(RowCoefficients, StatisticsFromMergedSums) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    logitless_test::Random random(seed);
    Row row;
    double mean = 0, largest = -INFINITY;
    for (int j = 0; j < 9; ++j) {
      row.z.push_back(2 * random.normal());
      row.w.push_back(1);
      mean += row.z.back() / 9;
      largest = std::max(largest, row.z.back());
    }
    row.target = static_cast<size_t>(random.integer(0, 8));
    row.params.vocab_total = row.params.class_weight_sum = 9;
    const RowLoss<double> loss = loss_of(row);
    double squares = 0;
    for (const double z : row.z) squares += std::exp(2 * (z - loss.lse));
    EXPECT_NEAR(loss.mean_logit, mean, 1e-14);
    EXPECT_NEAR(loss.log_sum_sq_probs, std::log(squares), 1e-13);
    EXPECT_EQ(loss.max_logit, largest);
    EXPECT_EQ(loss.is_top1, row.z[row.target] == largest ? 1 : 0);
  }
}

// At p = 0 no term is 0 times an infinity, of the target and of others, whatever coefficients are 0.
TEST(RowCoefficients, MaskedColumnsHaveFiniteGradients) {
  for (double a : {0.0, 0.5}) {
    for (double b : {0.0, -0.25}) {
      for (double g : {0.0, 0.5, 2.0}) {
        const RowCoefficients<double> k{a, b, 0, g};
        EXPECT_EQ(dz_element<double>(k, -INFINITY, 1.0, 1), -g);
        EXPECT_EQ(dz_element<double>(k, -INFINITY, 1.0, 0), 0);
        EXPECT_EQ(dz_element(k, -1e5, 1.0, 0), 0);
      }
    }
  }
}

TEST(RowCoefficients, ACertainTargetKeepsItsDigits) {
  const RowCoefficients<double> k{0.5, 0, 0, 0.5};
  EXPECT_NEAR(dz_element(k, -1e-20, 1.0, 1), -0.5e-20, 1e-34);
}

// log p from the two parts has the digits that their sum has not.
TEST(RowCoefficients, LseInTwoFloats) {
  for (double max : {0.0, 1e3, -1e6, 16777216.0, 0x1p62}) {
    const LogSumExp<double> lse{max, 5.3};
    EXPECT_EQ(lse.log_p(max), -5.3);
    const LogSumExp<float> pair = split_to<float>(lse);
    const LogSumExp<double> saved{pair.high, pair.low};
    EXPECT_NEAR(saved.log_p(max), -5.3, 1e-6) << max;
    EXPECT_EQ(pair.high, static_cast<float>(max + 5.3));
  }
  for (double special : std::vector<double>{NAN, INFINITY, -INFINITY}) {
    EXPECT_EQ(split_to<float>(LogSumExp<double>{special, 0}).low, 0);
  }
}

// As in PyTorch: not inf, which a finite loss may come near to.
TEST(RowCoefficients, ALogitOfInfinityMakesTheLossNaN) {
  RowStats<double> stats;
  stats.max = INFINITY;
  stats.sum_exp = 1;
  const RowLoss<double> loss = row_loss<double>({}, {}, stats, /*target=*/-1);
  for (double value : {loss.loss, loss.nll, loss.lse, loss.entropy}) EXPECT_TRUE(std::isnan(value));
}

TEST(RowCoefficients, PlainCrossEntropyNeedsOnlyAAndG) {
  LossParams<double> params;
  params.vocab_total = params.class_weight_sum = 10;
  const auto k = row_coefficients<double>(params, {}, {0.25, 0, 0, 0}, 3.0, 0.0);
  EXPECT_EQ(k.a, 0.25);
  EXPECT_EQ(k.b, 0);
  EXPECT_EQ(k.c, 0);
  EXPECT_EQ(k.g, 0.25);
}

}  // namespace
}  // namespace logitless
