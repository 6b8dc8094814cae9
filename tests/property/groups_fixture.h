#pragma once
// Ranks that are threads, each with a shard of the vocabulary.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "engine_test.h"
#include "rank_group.h"

namespace logitless_test {

using Sizes = std::vector<int64_t>;

class GroupTest : public EngineTest {
 protected:
  GroupTest() { context_ = make_context(engine(), 2); }

  // Returns every rank's own problem.
  static std::vector<logitless::Problem> cut(
      const logitless::Problem& whole, const Sizes& sizes,
      logitless::GroupDHidden d_hidden = logitless::GroupDHidden::sum) {
    std::vector<logitless::Problem> ranks;
    int64_t start = 0;
    for (int64_t size : sizes) {
      logitless::Problem p = whole;
      p.vocab = size;
      logitless::set_group(p, static_cast<int32_t>(sizes.size()), start, whole.vocab, std::ranges::max(sizes),
                           d_hidden);
      start += size;
      ranks.push_back(p);
    }
    return ranks;
  }

  // Returns the size of saved that the plan of a rank's backward pass chooses.
  uint64_t saved_bytes_of(const Case& c, const Sizes& sizes, size_t budget) const {
    logitless::Problem later = pass_problem(c, logitless::Pass::backward);
    later.max_workspace_bytes = budget;
    return logitless::Plan(context_, cut(later, sizes)[0]).info().saved_bytes;
  }

  // Returns the outputs of one pass, which every rank runs at the same time. Outputs for rows have the same
  // bits on all ranks; gradients are put together.
  Outputs run_ranks(const Case& c, logitless::Pass pass, const Sizes& sizes, size_t budget = 0,
                    const Outputs* known = nullptr, bool only_losses = false) const {
    logitless::Problem whole = pass_problem(c, pass);
    whole.max_workspace_bytes = budget;
    const auto ranks = static_cast<int64_t>(sizes.size());
    const bool is_exact = whole.gradient == LOGITLESS_EXACT;
    const bool scatters = is_exact && whole.has.d_hidden != 0 && whole.tokens % ranks == 0 && c.seed % 2 == 0;
    if (whole.saved_bytes == INT64_MAX) whole.saved_bytes = saved_bytes_of(c, sizes, budget);
    const auto problems =
        cut(whole, sizes, scatters ? logitless::GroupDHidden::sum_of_own : logitless::GroupDHidden::sum);
    std::vector<Outputs> outputs(sizes.size());
    RankGroup group(static_cast<int>(ranks), is_device());
    group.run([&](int rank, const logitless::Communicator& communicator) {
      const auto r = static_cast<size_t>(rank);
      Outputs mine;  // saved bytes are each rank's own
      if (known != nullptr) mine = *known;
      if (known != nullptr && whole.has.saved) mine.saved = saved_[r];
      outputs[r] =
          run_pass(context_, problems[r], c, known == nullptr ? nullptr : &mine, &communicator, only_losses);
    });
    calls_ = group.calls();
    Outputs out = outputs[0];
    const auto join = [&](std::vector<double> Outputs::*gradient) {
      (out.*gradient).clear();
      for (const Outputs& each : outputs) {
        (out.*gradient).insert((out.*gradient).end(), (each.*gradient).begin(), (each.*gradient).end());
      }
    };
    join(&Outputs::d_weight);
    join(&Outputs::d_bias);
    saved_.clear();
    const size_t own = out.d_hidden.size() / sizes.size();
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      saved_.push_back(outputs[rank].saved);
      if (!scatters) continue;
      const auto first = static_cast<std::ptrdiff_t>(rank * own);
      std::copy_n(outputs[rank].d_hidden.begin() + first, own, out.d_hidden.begin() + first);
    }
    for (Outputs& each : outputs) {
      EXPECT_TRUE(same_bits(each.loss, out.loss) && same_bits(each.lse, out.lse)) << "between ranks";
      if (!is_exact) continue;
      each.d_weight = out.d_weight;
      each.d_bias = out.d_bias;
      if (scatters) each.d_hidden = out.d_hidden;
      EXPECT_STREQ(first_difference(out, each), "") << "between ranks";
    }
    return out;
  }

  Outputs solve_in_group(const Case& c, const Sizes& sizes, size_t budget = 0) const {
    return solve_passes(c, [&](logitless::Pass pass, const Outputs* known) {
      return run_ranks(c, pass, sizes, budget, known);
    });
  }

  mutable std::vector<std::vector<double>> saved_;  // of the last forward pass, by rank
  mutable int64_t calls_ = 0;                       // number of collectives in the last pass
};

}  // namespace logitless_test
