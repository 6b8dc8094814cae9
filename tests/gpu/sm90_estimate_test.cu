// The steps before the first draw of sparsified gradients: the choice of dense and of sampled columns, and
// the lse estimate from them.
#include <algorithm>
#include <numeric>

#include "cuda/run/sparsified/sparsified.h"
#include "sm90_fixture.cuh"

namespace logitless::cuda::sm90::test {
namespace {

struct Size {
  int64_t tokens, vocab, dense, sampled;
};
const Size kSizes[] = {{1, 1, 1, 0},
                       {7, 2, 1, 1},
                       {40, 50, 8, 42},
                       {300, 1000, 8, 768},
                       {3000, 9001, 88, 768},
                       {8192, 131072, 768, 768},
                       {500, 262147, 768, 768},
                       {3000, 131072, 768, 384},
                       {100, 40000, 416, 576}};

class Estimating : public OnHopper<Size> {
 protected:
  // Low columns are frequent; some targets are in another shard, or ignored.
  static std::vector<int32_t> random_targets(const Size& size) {
    std::mt19937 engine(5);
    std::uniform_real_distribution<double> uniform(0, 1);
    std::vector<int32_t> targets(size.tokens);
    for (int64_t i = 0; i < size.tokens; ++i) {
      const double u = uniform(engine);
      targets[i] = static_cast<int32_t>(u * u * u * static_cast<double>(size.vocab));
      if (i % 10 == 3) targets[i] = i % 20 == 3 ? -1 : kIgnoredRow;
    }
    return targets;
  }
};

// The most frequent targets in order, the first of equals before the others.
std::vector<int32_t> most_frequent(const Size& size, const std::vector<int32_t>& targets) {
  std::vector<int32_t> count(size.vocab), columns(size.vocab);
  for (const int32_t y : targets) {
    if (y >= 0) ++count[y];
  }
  std::iota(columns.begin(), columns.end(), 0);
  std::stable_sort(columns.begin(), columns.end(), [&](int a, int b) { return count[a] > count[b]; });
  columns.resize(size.dense);
  std::sort(columns.begin(), columns.end());
  return columns;
}

TEST_P(Estimating, EachColumnIsDenseOrInTheStretchOfASample) {
  const Size size = GetParam();
  const std::vector<int32_t> targets = random_targets(size);
  const Guarded<int32_t> target(targets);
  const Guarded<int32_t> count(size.vocab), bins(kCountBins), role(size.vocab), dense(size.dense),
      sample(size.sampled);
  const Guarded<uint64_t> totals(kMostCountBlocks);
  const Guarded<float> others(size.sampled);
  ChooseColumns c{};
  c.target = target.get();
  c.tokens = size.tokens;
  c.vocab = size.vocab;
  c.dense = size.dense;
  c.sampled = size.sampled;
  c.count = count.get();
  c.bins = bins.get();
  c.totals = totals.get();
  c.role = role.get();
  c.dense_columns = dense.get();
  c.sample = sample.get();
  c.sample_others = others.get();
  launch_choose_columns(c, nullptr);
  check_cuda(cudaDeviceSynchronize());
  for (const auto* array : {&count, &bins, &role, &dense, &sample}) array->expect_guards();
  totals.expect_guards();
  others.expect_guards();

  const std::vector<int32_t> dense_columns = dense.read(), samples = sample.read(), roles = role.read();
  ASSERT_EQ(dense_columns, most_frequent(size, targets));
  std::vector<int32_t> expected_roles(size.vocab, -1);
  for (int64_t k = 0; k < size.dense; ++k) expected_roles[dense_columns[k]] = static_cast<int32_t>(k);
  const std::vector<float> other = others.read();
  int64_t previous = -1, all = 0;
  for (int64_t s = 0; s < size.sampled; ++s) {
    all += static_cast<int64_t>(other[s]) + 1;
    // The widest stretch has twice the average.
    ASSERT_LE(other[s], 2.0 * static_cast<double>(size.vocab) / static_cast<double>(size.sampled) + 1);
    if (samples[s] == kIgnoredRow) {
      ASSERT_EQ(other[s], -1) << s;
      continue;
    }
    ASSERT_GE(other[s], 0) << s;
    ASSERT_GT(samples[s], previous);
    previous = samples[s];
    ASSERT_EQ(expected_roles[samples[s]], -1) << "dense";
    expected_roles[samples[s]] = static_cast<int32_t>(-2 - s);
  }
  if (size.sampled > 0) ASSERT_EQ(all, size.vocab - size.dense);
  ASSERT_EQ(roles, expected_roles);
}

// The estimate of estimate_lse.cu, in float64.
double expected_estimate(double known, const std::vector<double>& z, const std::vector<float>& others) {
  double largest = known;
  for (const double each : z) largest = std::max(largest, each);
  if (!std::isfinite(largest)) return known;
  double seen = std::exp(known - largest);
  for (const double each : z) seen += std::exp(each - largest);
  double total = seen;
  for (int round = 0; round < 4; ++round) {
    double unseen = 0;
    for (size_t s = 0; s < z.size(); ++s) {
      unseen += std::min(others[s] * std::exp(z[s] - largest), total / 16);
    }
    total = seen + unseen;
  }
  return largest + std::log(total);
}

TEST_P(Estimating, EstimateIsTheSumOfWhatStretchesStandFor) {
  const Size size = GetParam();
  constexpr int64_t kRows = 45, kPartials = 35;
  constexpr float kScale = 0.75f, kThreshold = 0x1p-7f;
  const std::vector<float> partial_max = random_floats(kPartials * kRows, 3, 1);
  std::vector<float> partial_sum = random_floats(kPartials * kRows, 1, 2),
                     logits = random_floats(kRows * size.sampled, 4, 3);
  for (float& sum : partial_sum) sum = 1 + std::abs(sum);
  for (int64_t s = 0; s < size.sampled; ++s)
    logits[(kRows - 1) * size.sampled + s] = s == 1 ? 60.f : -20.f;  // a peak
  const std::vector<float> target_logits = random_floats(kRows, 6, 4),
                           biases = random_floats(size.vocab, 1, 6);
  std::vector<int32_t> samples(size.sampled), roles(size.vocab, -1), targets(kRows);
  std::vector<float> other(size.sampled);
  for (int64_t s = 0; s < size.sampled; ++s) {
    const int64_t column = s * size.vocab / size.sampled;
    const bool exists = s % 9 != 4;
    samples[s] = exists ? static_cast<int32_t>(column) : kIgnoredRow;
    other[s] = exists ? static_cast<float>(s % 300) : -1.f;
    if (exists) roles[column] = static_cast<int32_t>(-2 - s);
  }
  for (int64_t i = 0; i < kRows; ++i) {
    targets[i] = i % 7 == 2 ? kIgnoredRow : i % 7 == 3 ? -1 : static_cast<int32_t>(i * 31 % size.vocab);
  }
  const Guarded<float> products(logits), target_logit(target_logits), bias(biases), others(other),
      lse_estimate(kRows), lse_estimate_residual(kRows), logit_offset(kRows), threshold(kRows);
  const Guarded<int32_t> sample(samples), role(roles), target(targets), count(kRows);
  PartialStats partials;
  partials.partials = kPartials;
  partials.stride = kRows;
  LseEstimate g{};
  g.rows = kRows;
  g.sampled = size.sampled;
  g.partials = &partials;
  g.logits = products.get();
  g.sample = sample.get();
  g.sample_others = others.get();
  g.transform.scale = kScale;
  g.threshold = kThreshold;
  g.target = target.get();
  g.target_logit = target_logit.get();
  g.role = role.get();
  g.lse_estimate = lse_estimate.get();
  g.lse_estimate_residual = lse_estimate_residual.get();
  g.logit_offset = logit_offset.get();
  g.row_threshold = threshold.get();
  g.count = count.get();
  for (const bool with_bias : {false, true}) {
    for (const float softcap : {0.f, 9.f}) {
      const Guarded<float> max(partial_max), sum(partial_sum);
      partials.max = max.get();
      partials.sum = sum.get();
      g.transform.bias = with_bias ? bias.get() : nullptr;
      g.transform.softcap = softcap;
      launch_estimate_lse(g, nullptr);
      check_cuda(cudaDeviceSynchronize());
      for (const auto* array : {&lse_estimate, &lse_estimate_residual, &logit_offset, &threshold})
        array->expect_guards();
      count.expect_guards();
      const std::vector<float> got = lse_estimate.read(), thresholds = threshold.read();
      ASSERT_EQ(logit_offset.read(), got);
      ASSERT_EQ(lse_estimate_residual.read(), std::vector<float>(kRows, 0));
      ASSERT_EQ(count.read(), std::vector<int32_t>(kRows, 0));
      // The partials are then those of no column.
      ASSERT_EQ(max.read(), std::vector<float>(kPartials * kRows, -INFINITY));
      ASSERT_EQ(sum.read(), std::vector<float>(kPartials * kRows, 0));
      for (int64_t i = 0; i < kRows; ++i) {
        ASSERT_EQ(thresholds[i], targets[i] == kIgnoredRow ? INFINITY : kThreshold);
        double known = 0, size_of_z = 0;
        for (int64_t s = 0; s < kPartials; ++s)
          known += partial_sum[s * kRows + i] * std::exp(double{partial_max[s * kRows + i]});
        if (targets[i] >= 0 && roles[targets[i]] == -1) known += std::exp(double{target_logits[i]});
        std::vector<double> z(size.sampled);
        for (int64_t s = 0; s < size.sampled; ++s) {
          double each = double{kScale} * logits[i * size.sampled + s];
          if (with_bias && samples[s] >= 0) each += biases[samples[s]];
          if (softcap != 0) each = softcap * std::tanh(each / softcap);
          size_of_z = std::max(size_of_z, std::abs(each));
          z[s] = samples[s] >= 0 ? each : -INFINITY;
        }
        // Terms are exp logits of rounded logits, in sums of at most 24 + 5 and 2 + 5 steps.
        const double error = (4 * size_of_z + 64) * 0x1p-24;
        ASSERT_NEAR(got[i], expected_estimate(std::log(known), z, other), error)
            << "row " << i << ", bias " << with_bias << ", softcap " << softcap;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Estimating, testing::ValuesIn(kSizes));

}  // namespace
}  // namespace logitless::cuda::sm90::test
