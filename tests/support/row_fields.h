#pragma once
#include <vector>

#include "solve.h"

namespace logitless_test {

// A buffer of one number a row that a forward pass writes, and where a run keeps what was written.
struct RowField {
  const char* name;
  std::vector<double> Outputs::*values;
  void* logitless::Buffers::*field;
  bool logitless::Problem::Has::*want = nullptr;  // the tensor that a plan needs for it; null: none
  bool smoothing = false;                         // only with label smoothing

  bool is_wanted(const logitless::Problem& p) const {
    return (want == nullptr || p.has.*want) && (!smoothing || p.label_smoothing > 0);
  }
};

#define LOGITLESS_FIELD(name) #name, &Outputs::name, &logitless::Buffers::name
// Sums, which shards add up where they have one maximum.
inline constexpr RowField kRowSums[] = {
    {LOGITLESS_FIELD(sum_exp)},
    {LOGITLESS_FIELD(target_logit)},
    {LOGITLESS_FIELD(sum_exp_logit), &logitless::Problem::Has::entropy},
    {LOGITLESS_FIELD(weighted_logit_sum), nullptr, true},
    {LOGITLESS_FIELD(logit_sum), &logitless::Problem::Has::mean_logit},
    {LOGITLESS_FIELD(sum_sq_exp), &logitless::Problem::Has::log_sum_sq_probs},
};
// What only a whole vocabulary has.
inline constexpr RowField kRowOutputs[] = {
    {LOGITLESS_FIELD(nll)},
    {LOGITLESS_FIELD(lse)},
    {LOGITLESS_FIELD(entropy), &logitless::Problem::Has::entropy},
    {LOGITLESS_FIELD(mean_logit), &logitless::Problem::Has::mean_logit},
    {LOGITLESS_FIELD(log_sum_sq_probs), &logitless::Problem::Has::log_sum_sq_probs},
    {LOGITLESS_FIELD(max_logit)},
};
#undef LOGITLESS_FIELD

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

}  // namespace logitless_test
