#pragma once
#include <cstdint>

#include "core/buffers.h"
#include "core/problem.h"
#include "core/row_coefficients.h"
#include "core/row_stats.h"
#include "core/sampling.h"
#include "core/targets.h"
#include "core/top_k.h"

namespace logitless {

// Bytes of Buffers::screen_weight on the host, where operands are rounded element by element: an int32
// exponent (core/fp8.h) for each row of the weight.
inline uint64_t host_screen_weight_bytes(const Problem& p) {
  const bool keeps = p.has.screen_weight && p.tokens > 0;
  return keeps ? static_cast<uint64_t>(p.vocab) * sizeof(int32_t) : 0;
}

// The work on N-vectors around the kernels, for backends whose buffers are host memory: from merged row
// statistics to losses and outputs, and from upstream gradients to row coefficients. All of it is in double,
// and rows are in order.
struct HostLoss {
  const Problem& problem;
  const Buffers& buffers;
  LossParams<double> params;
  double divisor = 1;  // divisor of the reduction
};

// rows: the row_count rows that are not ignored.
HostLoss make_host_loss(const Problem& problem, const Buffers& buffers, const int64_t* rows,
                        int64_t row_count);

RowWeights<double> row_weights(const HostLoss& context, int64_t row);

// Returns 1 / T of a row.
double inverse_temperature_of_row(const Problem& problem, const Buffers& buffers, int64_t row);

// Returns the coefficients of one valid row, divided by its temperature. entropy is read only if it has a
// gradient.
RowCoefficients<double> coefficients_of_row(const HostLoss& context, int64_t row, double lse, double entropy);

// Returns the lse of an earlier forward pass, with the buffers' lse_residual if there is one. For backward
// passes.
LogSumExp<double> known_lse(const HostLoss& context, int64_t row);

// Returns the seed of the run: the buffers' if there is one, else the problem's.
int64_t seed_of(const Problem& problem, const Buffers& buffers);

// Returns the generator's key for a sample of a row.
SampleKey sample_key_of(const Problem& problem, const Buffers& buffers, int64_t row, int64_t sample);

// Returns the mask of the run, by the caller's rows.
inline ColumnMask column_mask(const Problem& problem, const Buffers& buffers) {
  return {buffers.sample_mask, mask_words(problem.vocab)};
}

// Fills every per-token output of the forward pass with the values of an ignored row.
void write_ignored_defaults(const Problem& problem, const Buffers& buffers);

// Writes the largest logits, in order, of a row that is not ignored.
template <class T>
void write_top(const Problem& problem, const Buffers& buffers, int64_t row, std::span<const TopLogit<T>> top,
               const LogSumExp<double>& lse) {
  for (size_t i = 0; i < top.size(); ++i) {
    const int64_t at = row * problem.top_k + static_cast<int64_t>(i);
    if (buffers.top_ids != nullptr) buffers.top_ids[at] = top[i].id;
    if (buffers.top_log_probs != nullptr) {
      store_from_double(buffers.top_log_probs, problem.stats_dtype(), at, lse.log_p(double{top[i].z}));
    }
  }
}

// Adds a logit to a sample.
template <class T>
void add_to_sample(SampledLogit<T>& sample, SampleKey key, T z, int64_t id) {
  const T of_id = z + static_cast<T>(sample_noise(key, static_cast<uint32_t>(id)));
  if (sample.id < 0 || is_better(of_id, id, sample.key, sample.id)) sample = {of_id, z, id};
}

// Writes a sample of a row that is not ignored.
template <class T>
void write_sample(const Problem& problem, const Buffers& buffers, int64_t row, int64_t sample,
                  const SampledLogit<T>& logit, const LogSumExp<double>& lse) {
  const int64_t at = row * problem.num_samples + sample;
  const auto store = [&](void* data, double value) {
    if (data != nullptr) store_from_double(data, problem.stats_dtype(), at, value);
  };
  if (buffers.sampled_ids != nullptr) buffers.sampled_ids[at] = logit.id;
  store(buffers.sampled_keys, double{logit.key});
  store(buffers.sampled_logits, double{logit.z});
  store(buffers.sampled_log_probs, lse.log_p(double{logit.z}));
}

// Writes the log-probabilities of the targets of a row that is not ignored. There is a logit for each;
// targets of other ranks get 0.
template <class T>
void write_target_log_probs(const Problem& problem, const Buffers& buffers, int64_t row,
                            std::span<const T> logits, const LogSumExp<double>& lse) {
  if (buffers.target_log_probs == nullptr) return;
  for (size_t i = 0; i < logits.size(); ++i) {
    const auto k = static_cast<int64_t>(i);
    const bool is_mine = is_here(problem, target_of_row(problem, buffers.targets, row, k));
    store_from_double(buffers.target_log_probs, problem.stats_dtype(), row * problem.targets_per_row + k,
                      is_mine ? lse.log_p(double{logits[i]}) : 0);
  }
}

// Returns sum_k q_k z_k from the logits of the targets of a row that is not ignored. A target of weight 0
// takes no part.
template <class T>
double target_logit_of(const Problem& problem, const Buffers& buffers, int64_t row,
                       std::span<const T> logits) {
  double sum = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double q = target_weight_of_row(problem, buffers, row, static_cast<int64_t>(i));
    if (q != 0) sum += q * double{logits[i]};
  }
  return sum;
}

// Fills the diagnostics of sparsified gradients with the values of ignored rows, which drawn rows then
// replace.
void write_undrawn_defaults(const Problem& problem, const Buffers& buffers);

// Takes the statistics of the valid rows in ascending order and writes the outputs that the buffers have.
class HostLossWriter {
 public:
  explicit HostLossWriter(const HostLoss& context) : context_(context) {}
  void add(int64_t row, const RowStats<double>& stats);
  void add_losses(int64_t row,
                  const RowStats<double>& stats);  // writes losses, but not the statistics themselves
  void finish();                                   // writes the reduced loss and the counts
  const HostLoss& context() const { return context_; }

 private:
  const HostLoss& context_;
  double sum_ = 0;
  int64_t valid_ = 0;
  int64_t correct_ = 0;
};

// Reads and writes the statistics of one row, as far as the buffers have them.
RowStats<double> read_row_stats(const Problem& problem, const Buffers& buffers, int64_t row);
void write_row_stats(const Problem& problem, const Buffers& buffers, int64_t row,
                     const RowStats<double>& stats);

// Makes losses from row statistics in the buffers, for a caller that merged the shards of a vocabulary. rows:
// workspace of N.
void losses_from_row_stats(const Problem& problem, const Buffers& buffers, int64_t* rows);

}  // namespace logitless
