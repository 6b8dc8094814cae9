#pragma once
// Thinned gradients of ranks that are threads, each with a shard of the vocabulary.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "compare.h"
#include "rank_group.h"

namespace logitless_test {

using Sizes = std::vector<int64_t>;

constexpr double kKeepsAll = 1e-30;  // as a threshold

class ThinnedGroupsTest : public testing::TestWithParam<Engine> {
 protected:
  static Case thinned(Case c, double threshold) {
    logitless::Problem& p = c.problem;
    p.gradient = LOGITLESS_ALWAYS_THINNED;
    p.threshold = threshold;
    p.top_k = 0;
    p.accumulate.d_hidden = p.accumulate.d_classifier = p.accumulate.d_bias = 0;
    c.d_hidden_start.clear();
    c.d_classifier_start.clear();
    c.d_bias_start.clear();
    c.d_hidden_layout = {};
    if (p.dtype.hidden != LOGITLESS_F64) {
      p.dtype.d_hidden = p.dtype.d_classifier = p.dtype.d_bias = LOGITLESS_F32;
    }
    return c;
  }

  Outputs run_ranks(const Case& c, logitless::Pass pass, const Sizes& sizes, const Outputs* known,
                    size_t budget) const {
    std::vector<Outputs> found(sizes.size());
    RankGroup group(static_cast<int>(sizes.size()), GetParam().is_device());
    group.run([&](int rank, const logitless::Communicator& communicator) {
      logitless::Problem p = pass_problem(c, pass);
      p.vocab = sizes[static_cast<size_t>(rank)];
      p.max_workspace_bytes = budget;
      int64_t start = 0;
      for (int before = 0; before < rank; ++before) start += sizes[static_cast<size_t>(before)];
      logitless::set_group(p, static_cast<int32_t>(sizes.size()), start, c.problem.vocab,
                           std::ranges::max(sizes));
      Outputs mine;  // draws are each rank's own
      if (known != nullptr) mine = *known;
      if (p.has.draws && known != nullptr) mine.draws = draws_[static_cast<size_t>(rank)];
      found[static_cast<size_t>(rank)] =
          run_pass(context_, p, c, known == nullptr ? nullptr : &mine, &communicator);
    });
    calls_ = group.calls();
    Outputs out = found[0];
    out.d_classifier.clear();
    out.d_bias.clear();
    draws_.clear();
    for (const Outputs& each : found) {
      EXPECT_TRUE(same_bits(each.loss, out.loss) && same_bits(each.lse, out.lse)) << "between ranks";
      out.d_classifier.insert(out.d_classifier.end(), each.d_classifier.begin(), each.d_classifier.end());
      out.d_bias.insert(out.d_bias.end(), each.d_bias.begin(), each.d_bias.end());
      draws_.push_back(each.draws);
    }
    return out;
  }

  Outputs solve_in_group(const Case& c, const Sizes& sizes, size_t budget = 0) const {
    if (c.mode == Mode::kForwardBackward) {
      return run_ranks(c, logitless::Pass::forward_backward, sizes, nullptr, budget);
    }
    Outputs out = run_ranks(c, logitless::Pass::forward, sizes, nullptr, budget);
    Outputs gradients = run_ranks(c, logitless::Pass::backward, sizes, &out, budget);
    out.d_hidden = std::move(gradients.d_hidden);
    out.d_classifier = std::move(gradients.d_classifier);
    out.d_bias = std::move(gradients.d_bias);
    return out;
  }

  // The mean over seeds, but for 5 of its own standard deviations.
  void expect_unbiased(Case c, const Sizes& sizes, int seed_count, double rounding) const {
    const std::vector<double> truth = Expected(c).truth().d_hidden;
    std::vector<double> sum(truth.size()), squares(truth.size());
    for (int seed = 0; seed < seed_count; ++seed) {
      c.problem.seed = seed;
      const Outputs got = solve_in_group(c, sizes);
      for (size_t i = 0; i < sum.size(); ++i) {
        sum[i] += got.d_hidden[i];
        squares[i] += got.d_hidden[i] * got.d_hidden[i];
      }
    }
    for (size_t i = 0; i < sum.size(); ++i) {
      const double mean = sum[i] / seed_count, variance = squares[i] / seed_count - mean * mean;
      EXPECT_NEAR(mean, truth[i], 5 * std::sqrt(std::max(variance, 0.0) / seed_count) + rounding)
          << "d_hidden[" << i << "]";
    }
  }

  logitless::Context context_ = make_context(GetParam(), 2);
  mutable std::vector<std::vector<double>> draws_;  // of the last forward pass, a rank each
  mutable int64_t calls_ = 0;                       // of collectives in the last pass
};

// Of engines that run on a device.
class ThinnedDeviceGroupsTest : public ThinnedGroupsTest {
 protected:
  void SetUp() override {
    const std::string why = why_not_thinned(GetParam());
    if (!why.empty()) GTEST_SKIP() << why;
  }

  // Each run is off by its own rounding, each rank's part of d_hidden is rounded, and so are the sums that
  // ranks tell each other.
  Bounds bounds_of(const Case& c, const Sizes& sizes) const {
    Bounds bounds = static_cast<double>(sizes.size() + 1) * Expected(c).bounds_of(GetParam());
    bounds.lse += static_cast<double>(sizes.size()) * 0x1p-23;
    return bounds;
  }
};

}  // namespace logitless_test
