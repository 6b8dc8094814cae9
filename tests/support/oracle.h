#pragma once
#include <cstdint>
#include <vector>

#include "case.h"

namespace logitless_test {

// All results of a case. Scalars are vectors of one.
struct Answer {
  std::vector<double> loss;               // [1], or [N] with reduction none
  std::vector<double> row_loss;           // [N], before the reduction
  std::vector<double> nll, lse, entropy;  // [N], 0 in ignored rows
  std::vector<double> target_logit, mean_logit, log_sum_sq_probs, max_logit;  // [N], 0 in ignored rows
  std::vector<int64_t> argmax;                                                // [N], -1 in ignored rows
  int64_t valid_count = 0;
  std::vector<double> d_hidden, d_weight, d_bias;
  std::vector<double> logits;  // [N, V]
  // The largest term of the sums behind a result, which bounds the change by one rounding, in rounding units.
  // A gradient has two kinds: the parts of the logits' gradient, and its change by a rounding of the largest
  // term of a logit.
  struct Terms {
    double logit = 0, row_loss = 0, entropy = 0;
    double target_weight = 1;  // the largest sum of the magnitudes of a row's target weights
    std::vector<double> loss;  // [N], for the row's loss
    struct Gradient {
      double part = 0, by_logit = 0;
    } d_hidden, d_weight, d_bias;
  } terms;
  double divisor = 1;
};

// Roundings to the format of 16-bit operands on the way to the gradients.
enum class Rounds {
  kNothing,
  kGradients,  // the gradient of the logits, before the two products
  // Exponentials that are kept until their sums are known. The row's factor is then applied to d_hidden, and
  // for d_weight to the rows of hidden, which rounds these as well. A second chunk of tokens may add to a
  // d_weight that was already rounded to its dtype.
  kExpLogits,
};

// Computes the case as PyTorch would with all logits in memory: F.cross_entropy(F.linear(hidden, weight,
// bias), targets) with our further options, and its gradients by the chain rule through log_softmax.
// T is the arithmetic. It is double for the truth, or long double for float64 problems. It is float for the
// naive computation of the same precision, whose error sets the fair error.
template <class T>
Answer materialise(const Case& c, Rounds rounds = Rounds::kNothing);

extern template Answer materialise<float>(const Case&, Rounds);
extern template Answer materialise<double>(const Case&, Rounds);
extern template Answer materialise<long double>(const Case&, Rounds);

}  // namespace logitless_test
