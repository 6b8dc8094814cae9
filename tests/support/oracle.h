#pragma once
#include <cstdint>
#include <vector>

#include "case.h"

namespace headroom_test {

// All results of a case. Scalars are vectors of one.
struct Answer {
  std::vector<double> loss;               // [1], or [N] with reduction none
  std::vector<double> row_loss;           // [N], before the reduction
  std::vector<double> nll, lse, entropy;  // [N], 0 in ignored rows
  std::vector<int64_t> argmax;            // [N], -1 in ignored rows
  int64_t correct_count = 0;
  int64_t valid_count = 0;
  std::vector<double> d_hidden, d_classifier, d_bias;
  std::vector<double> logits;  // [N, V]
  // The largest term of the sums behind a result: what one rounding changes it by, in rounding units. A
  // gradient has two kinds: the parts of the logits' gradient, and what a rounding of the largest term of a
  // logit does to it.
  struct Terms {
    double logit = 0, row_loss = 0, entropy = 0;
    std::vector<double> loss;  // [N], of the row's loss
    struct Gradient {
      double part = 0, by_logit = 0;
    } d_hidden, d_classifier, d_bias;
  } terms;
  double divisor = 1;
};

// Computes the case as PyTorch would with all logits in memory: F.cross_entropy(F.linear(hidden, classifier,
// bias), targets) with our further options, and its gradients by the chain rule through log_softmax. T is the
// arithmetic: double (or long double for float64 problems) for the truth; float for the naive computation of
// the same precision, whose error tells what error is fair. short_gradients: the gradient of the logits is
// rounded to bfloat16 before the two products, as a computation with 16-bit operands may.
template <class T>
Answer materialise(const Case& c, bool short_gradients = false);

extern template Answer materialise<float>(const Case&, bool);
extern template Answer materialise<double>(const Case&, bool);
extern template Answer materialise<long double>(const Case&, bool);

}  // namespace headroom_test
