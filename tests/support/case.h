#pragma once
#include <cstdint>
#include <logitless/logitless.hpp>
#include <string>
#include <vector>

#include "random.h"
#include "tensor.h"

namespace logitless_test {

// How the gradients are asked for.
enum class Mode { kForward, kForwardBackward, kForwardThenBackward };

// A problem with its data. The values are exactly representable in the dtypes of the problem.
struct Case {
  uint64_t seed = 0;
  Mode mode = Mode::kForwardBackward;
  // The whole vocabulary; pass and budget are set by those who run it, and a forward pass makes no gradient.
  // Options of the backward pass alone (has_grad_...) only with Mode::kForwardThenBackward.
  logitless::Problem problem;

  std::vector<double> hidden;         // [N, D]
  std::vector<double> weight;         // [V, D]
  std::vector<double> bias;           // [V]
  std::vector<int64_t> targets;       // [N], or [N, targets_per_row]
  std::vector<double> target_weight;  // [N, targets_per_row]; empty: ones
  std::vector<double> class_weight;   // [V]
  std::vector<double> token_weight;   // [N]
  std::vector<double> temperature;    // [N]
  std::vector<double> grad_loss;      // empty: 1; [1], or [N] with reduction none
  std::vector<double> grad_nll;       // [N], as the next two
  std::vector<double> grad_lse;
  std::vector<double> grad_entropy;
  std::vector<double> grad_target_logit;
  std::vector<int64_t> seed_in_memory;  // [1] in place of the problem's seed; empty: that
  std::vector<double> d_hidden_start;   // what the gradients' buffers hold before an accumulation
  std::vector<double> d_weight_start;
  std::vector<double> d_bias_start;

  Layout hidden_layout, weight_layout, d_hidden_layout, d_weight_layout;
  int64_t skew = 0;  // elements by which all other buffers are off a 64-byte boundary

  bool wants_gradients() const {
    if (mode == Mode::kForward) return false;
    return problem.has.d_hidden != 0 || problem.has.d_weight != 0 || problem.has.d_bias != 0;
  }
  int64_t targets_per_row() const { return problem.targets_per_row > 0 ? problem.targets_per_row : 1; }
  // The k-th global target of a row after the shift, or problem.ignore_index; and its weight, 0 of the
  // latter.
  int64_t target_of(int64_t row, int64_t k) const;
  double target_weight_of(int64_t row, int64_t k) const;
  // The first one that is not ignore_index; problem.ignore_index for an ignored row.
  int64_t target_of(int64_t row) const;
  double temperature_of(int64_t row) const {
    return temperature.empty() ? problem.temperature : temperature[static_cast<size_t>(row)];
  }
};

// Everything needed to see what a failing case was.
std::string describe(const Case& c);

struct CaseLimits {
  int64_t largest_dimension = 300;
  int64_t most_products = 200'000;  // N x V x D
  bool allow_fp64 = true;
  bool only_fp64 = false;
};

// A random problem over all options.
Case random_case(uint64_t seed, const CaseLimits& limits = {});

// Gives each row of a case `count` targets with weights in [low, high], some of them ignore_index or the same
// again, and takes its class weights away.
void give_targets(Random& random, Case* c, int64_t count, double low, double high);

// The problem of some of its rows, in their order. Without a shift.
Case rows_of(const Case& c, const std::vector<size_t>& rows);
// Picks rows of a vector that has as many elements for each of the tokens.
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
// 0 to count - 1, in an order of chance.
std::vector<size_t> shuffled_rows(size_t count, uint64_t seed);

// A plain cross entropy of standard normal data: mean, no options, all gradients that exist.
struct PlainSize {
  int64_t tokens, vocab, hidden;
};
Case plain_case(uint64_t seed, PlainSize size, logitless_dtype dtype = LOGITLESS_F32);

// Products alone make the logits then.
void remove_bias(Case* c);

// A dtype field of a problem as the enumeration.
inline logitless_dtype as_dtype(int32_t value) {
  return static_cast<logitless_dtype>(value);
}

// What numbers of an operand's dtype are multiplied in: the problem's compute_dtype where there is one.
logitless_dtype product_dtype(const logitless::Problem& problem, int32_t dtype);

// The stats dtype of a problem: of its weights, upstream gradients, losses and row statistics.
logitless_dtype stats_dtype(const logitless::Problem& problem);

// count draws of deviation * N(0, 1), rounded to the dtype.
std::vector<double> normal_values(Random& random, int64_t count, double deviation, logitless_dtype dtype);

// And of numbers between the two.
std::vector<double> uniform_values(Random& random, int64_t count, double low, double high,
                                   logitless_dtype dtype);

}  // namespace logitless_test
