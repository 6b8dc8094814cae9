#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <headroom/headroom.hpp>
#include <vector>

namespace headroom::cli {

// A statistic of each token that `headroom loss` makes where it is asked for.
struct LossStat {
  const char* name;    // in reports and files
  const char* option;  // that asks for it
  const char* label;   // of its mean over the tokens that count
  const char* help;
  int32_t headroom_problem::*want;  // the flag that it needs, or null
  void* headroom_buffers::*field;
};

inline constexpr std::array kLossStats = {
    LossStat{"lse", "--lse", "mean lse", "Log of the sum of the exponentials too", nullptr,
             &headroom_buffers::lse},
    LossStat{"entropy", "--entropy", "mean entropy", "Entropy of the prediction too",
             &headroom_problem::want_entropy, &headroom_buffers::entropy},
};

using LossStatFlags = std::array<bool, kLossStats.size()>;

// Calls body(stat, index) for those that are asked for.
template <class F>
void for_each_stat(const LossStatFlags& asked, const F& body) {
  for (size_t i = 0; i < kLossStats.size(); ++i) {
    if (asked[i]) body(kLossStats[i], i);
  }
}

}  // namespace headroom::cli
