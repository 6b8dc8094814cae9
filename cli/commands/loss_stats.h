#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <logitless/logitless.hpp>

#include "commands/loss_options.h"

namespace logitless::cli {

// A statistic of each token that `logitless loss` makes where it is asked for.
struct LossStat {
  const char* name;    // in reports and files
  const char* option;  // that asks for it
  const char* label;   // of its mean over the tokens that count
  const char* help;
  int32_t logitless_problem::*want;             // the flag that it needs, or null
  void* logitless_buffers::*field;              // elements as the loss', or null
  uint8_t* logitless_buffers::*flag = nullptr;  // in its place: elements are 0 or 1
};

inline constexpr std::array kLossStats = {
    LossStat{"lse", "--lse", "mean lse", "Log of the sum of the exponentials too", nullptr,
             &logitless_buffers::lse},
    LossStat{"entropy", "--entropy", "mean entropy", "Entropy of the prediction too",
             &logitless_problem::want_entropy, &logitless_buffers::entropy},
    LossStat{"target_logit", "--target-logit", "mean target logit", "Logit of the target too", nullptr,
             &logitless_buffers::target_logit},
    LossStat{"mean_logit", "--mean-logit", "mean logit", "Mean of the logits too",
             &logitless_problem::want_mean_logit, &logitless_buffers::mean_logit},
    LossStat{"log_sum_sq_probs", "--log-sum-sq-probs", "mean log sum p^2",
             "Log of the sum of the squared probabilities too", &logitless_problem::want_log_sum_sq_probs,
             &logitless_buffers::log_sum_sq_probs},
    LossStat{"max_logit", "--max-logit", "mean largest logit", "Largest logit too", nullptr,
             &logitless_buffers::max_logit},
    LossStat{"is_top1", "--is-top1", "share of top 1", "Whether the target has the largest logit, too",
             &logitless_problem::want_argmax, nullptr, &logitless_buffers::is_top1},
};

inline ElementType element_of(const LossStat& stat, logitless_dtype stats) {
  return stat.flag != nullptr ? ElementType::kBool : element_from_dtype(stats);
}

using LossStatFlags = std::array<bool, kLossStats.size()>;

// Calls body(stat, index) for those that are asked for.
template <class F>
void for_each_stat(const LossStatFlags& asked, const F& body) {
  for (size_t i = 0; i < kLossStats.size(); ++i) {
    if (asked[i]) body(kLossStats[i], i);
  }
}

}  // namespace logitless::cli
