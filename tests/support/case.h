#pragma once
#include <cstdint>
#include <logitless/logitless.hpp>
#include <string>
#include <vector>

#include "random.h"
#include "tensor.h"

namespace logitless_test {

// The passes in which a case makes its gradients.
enum class Mode { kForward, kForwardBackward, kForwardThenBackward };

// A problem with its data. The values are exactly representable in the dtypes of the problem.
struct Case {
  uint64_t seed = 0;
  Mode mode = Mode::kForwardBackward;
  // The problem over the whole vocabulary. Runs set pass and budget; a forward pass makes no gradient.
  // Options of the backward pass alone (has_grad_...) need Mode::kForwardThenBackward.
  logitless::Problem problem;

  std::vector<double> hidden;         // [N, D]
  std::vector<double> weight;         // [V, D]
  std::vector<double> bias;           // [V]
  std::vector<int64_t> targets;       // [N], or [N, targets_per_row]
  std::vector<double> target_weight;  // [N, targets_per_row]; empty: ones
  std::vector<double> class_weight;   // [V]
  std::vector<double> token_weight;   // [N]
  std::vector<double> temperature;    // [N]
  std::vector<double> grad_loss;      // empty: 1; otherwise [1], or [N] with reduction none
  std::vector<double> grad_nll;       // [N], like the next two
  std::vector<double> grad_lse;
  std::vector<double> grad_entropy;
  std::vector<double> grad_target_logit;
  std::vector<int64_t> sample_seed;     // [N], in place of the seed; empty: none
  std::vector<char> sample_mask;        // [N, V] whether the column may be sampled; empty: none
  std::vector<double> screen_weight;    // words that an earlier run wrote; empty: this run writes them
  bool has_targets = true;              // false: the run gets none
  std::vector<int64_t> seed_in_memory;  // [1], used in place of the problem's seed; empty: the problem's seed
  std::vector<double> d_hidden_start;   // contents of the gradients' buffers before an accumulation
  std::vector<double> d_weight_start;
  std::vector<double> d_bias_start;

  Layout hidden_layout, weight_layout, d_hidden_layout, d_weight_layout;
  int64_t skew = 0;  // elements by which all other buffers are off a 64-byte boundary

  bool wants_gradients() const {
    if (mode == Mode::kForward) return false;
    return problem.has.d_hidden != 0 || problem.has.d_weight != 0 || problem.has.d_bias != 0;
  }
  int64_t targets_per_row() const { return problem.targets_per_row > 0 ? problem.targets_per_row : 1; }
  // The k-th global target of a row after the shift, or problem.ignore_index; and its weight, 0 for
  // ignore_index.
  int64_t target_of(int64_t row, int64_t k) const;
  double target_weight_of(int64_t row, int64_t k) const;
  // The first target that is not ignore_index; problem.ignore_index for an ignored row.
  int64_t target_of(int64_t row) const;
  double temperature_of(int64_t row) const {
    return temperature.empty() ? problem.temperature : temperature[static_cast<size_t>(row)];
  }
};

// Describes a failing case in full.
std::string describe(const Case& c);

struct CaseLimits {
  int64_t largest_dimension = 300;
  int64_t most_products = 200'000;  // N x V x D
  bool allow_fp64 = true;
  bool only_fp64 = false;
};

// A random problem over all options.
Case random_case(uint64_t seed, const CaseLimits& limits = {});

// Gives each row of a case `count` targets with weights in [low, high]. Some targets are ignore_index, some
// repeat. Takes the case's class weights away.
void give_targets(Random& random, Case* c, int64_t count, double low, double high);

// Returns the problem of some of a case's rows, in their order. The case must have no shift.
Case rows_of(const Case& c, const std::vector<size_t>& rows);
// Picks rows of a vector that has the same number of elements for each token.
template <class T>
std::vector<T> rows_of(const std::vector<T>& values, size_t tokens, const std::vector<size_t>& rows) {
  const size_t width = tokens == 0 ? 0 : values.size() / tokens;
  std::vector<T> out;
  for (const size_t row : rows) {
    out.insert(out.end(), values.begin() + static_cast<std::ptrdiff_t>(row * width),
               values.begin() + static_cast<std::ptrdiff_t>((row + 1) * width));
  }
  return out;
}
// The numbers 0 to count - 1, in a random order.
std::vector<size_t> shuffled_rows(size_t count, uint64_t seed);

// A plain cross entropy of standard normal data: mean, no options, all gradients that exist.
struct PlainSize {
  int64_t tokens, vocab, hidden;
};
Case plain_case(uint64_t seed, PlainSize size, logitless_dtype dtype = LOGITLESS_F32);

// Removes the bias, so that products alone make the logits.
void remove_bias(Case* c);

// A dtype field of a problem as the enumeration.
inline logitless_dtype as_dtype(int32_t value) {
  return static_cast<logitless_dtype>(value);
}

// The dtype in which the numbers of an operand are multiplied: the problem's compute_dtype where there is
// one.
logitless_dtype product_dtype(const logitless::Problem& problem, int32_t dtype);

// The stats dtype of a problem: the dtype of its weights, upstream gradients, losses and row statistics.
logitless_dtype stats_dtype(const logitless::Problem& problem);

// Gives each row a mask of its own, which leaves about this share of the columns, and its target.
void mask_rows(Case* c, double share);

// Returns the case with exp logits that a forward pass saves for the backward pass, where an engine saves
// any.
Case saving(Case c);

// `count` draws of deviation * N(0, 1), rounded to the dtype.
std::vector<double> normal_values(Random& random, int64_t count, double deviation, logitless_dtype dtype);

// `count` draws of numbers between the two, rounded to the dtype.
std::vector<double> uniform_values(Random& random, int64_t count, double low, double high,
                                   logitless_dtype dtype);

}  // namespace logitless_test
