#pragma once
#include <vector>

#include "solve.h"

namespace headroom_test {

// A buffer of one number a row that a forward pass writes, and where a run keeps what was written.
struct RowField {
  const char* name;
  std::vector<double> Outputs::*values;
  void* headroom_buffers::*field;
  int32_t headroom_problem::*want = nullptr;  // the flag that it needs; null: none
  bool smoothing = false;                     // only with label smoothing

  bool is_wanted(const headroom_problem& p) const {
    return (want == nullptr || p.*want != 0) && (!smoothing || p.label_smoothing > 0);
  }
};

#define HEADROOM_FIELD(name) #name, &Outputs::name, &headroom_buffers::name
// Sums, which shards add up where they have one maximum.
inline constexpr RowField kRowSums[] = {
    {HEADROOM_FIELD(sum_exp)},
    {HEADROOM_FIELD(target_logit)},
    {HEADROOM_FIELD(sum_exp_logit), &headroom_problem::want_entropy},
    {HEADROOM_FIELD(weighted_logit_sum), nullptr, true},
    {HEADROOM_FIELD(logit_sum), &headroom_problem::want_mean_logit},
    {HEADROOM_FIELD(sum_sq_exp), &headroom_problem::want_log_sum_sq_probs},
};
// What only a whole vocabulary has.
inline constexpr RowField kRowOutputs[] = {
    {HEADROOM_FIELD(nll)},
    {HEADROOM_FIELD(lse)},
    {HEADROOM_FIELD(entropy), &headroom_problem::want_entropy},
    {HEADROOM_FIELD(mean_logit), &headroom_problem::want_mean_logit},
    {HEADROOM_FIELD(log_sum_sq_probs), &headroom_problem::want_log_sum_sq_probs},
    {HEADROOM_FIELD(max_logit)},
};
#undef HEADROOM_FIELD

// is_top1 has a byte a row. Here it is read as words, and then taken apart.
inline int64_t words_of_bytes(int64_t bytes) {
  return (bytes + 3) / 4;
}
inline std::vector<double> bytes_of_words(const std::vector<double>& words, int64_t bytes) {
  std::vector<double> out;
  for (int64_t i = 0; i < bytes; ++i) {
    const auto word = static_cast<uint32_t>(static_cast<int32_t>(words[static_cast<size_t>(i / 4)]));
    out.push_back(word >> (8 * (i % 4)) & 0xff);
  }
  return out;
}

}  // namespace headroom_test
