#pragma once

// Do two heads train the same model? Both start from the same parameters and see the same data; what differs
// is the rounding of fp32. The tolerance is derived from that rounding, to first order, not chosen.

#include <cstdint>
#include <span>
#include <vector>

namespace logitless::train {

struct HeadSize {
  int64_t tokens;
  int64_t vocab;
  int64_t dim;
};

// What the tolerance of a step needs to know of it.
struct StepBounds {
  double loss;
  double learning_rate;
  double gradient_norm;  // sum of |g| over all parameters
  double logit_bound;    // largest |hidden_i| * |classifier_j|
};

// Bounds on the difference of two fp32 computations of one head. A sum of n terms is taken to be wrong by
// lambda * sqrt(n) * u of the sum of their magnitudes: the probabilistic bound of Higham and Mary (2019),
// with u = 2^-24 and lambda = 6, at which a bound is broken with a probability below 2n * exp(-18).
double loss_tolerance(const HeadSize& size, double loss, double logit_bound);
// Relative, in the sum of magnitudes.
double gradient_tolerance(const HeadSize& size, double logit_bound);

// For every step, how far the two losses may lie apart: the rounding of the losses themselves, and the drift
// of the parameters. AdamW moves every parameter by about the learning rate, so a relative error e of a
// gradient displaces the next parameters by at most 2 e * rate an element, and the loss by 2 e * rate * sum
// |g|.
std::vector<double> curve_tolerances(const HeadSize& size, std::span<const StepBounds> steps);

struct Agreement {
  std::vector<double> difference;  // of the losses, a step each
  std::vector<double> tolerance;
  double d_hidden_difference =
      0.0;  // relative, sum of magnitudes; at the first step, where inputs are the same
  double d_classifier_difference = 0.0;
  double gradient_tolerance = 0.0;

  double largest_difference() const;
  bool holds() const;
};

// sum |a - b| / sum |b|
double relative_difference(std::span<const float> a, std::span<const float> b);

}  // namespace logitless::train
