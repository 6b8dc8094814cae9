#include "train/agreement.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace logitless::train {
namespace {

constexpr double kUnit = 0x1.0p-24;
constexpr double kLambda = 6.0;

double sum_error(int64_t terms) {
  return kLambda * std::sqrt(static_cast<double>(terms)) * kUnit;
}

// Absolute error of one logit; sum_d |e_d c_d| <= |e| |c|.
double logit_error(const HeadSize& size, double logit_bound) {
  return sum_error(size.dim) * logit_bound;
}

// Relative error of a softmax element: two logits (its own and the maximum), the sum of the exponentials, and
// the roundings of the exponential's argument, of the exponential and of the division.
double softmax_error(const HeadSize& size, double logit_bound) {
  return 2 * logit_error(size, logit_bound) + sum_error(size.vocab) + kUnit * (2 * logit_bound + 4);
}

}  // namespace

double loss_tolerance(const HeadSize& size, double loss, double logit_bound) {
  // -log of a softmax element: its relative error, and the rounding of the logarithm, the mean and the
  // result.
  return 2 * (softmax_error(size, logit_bound) + 3 * kUnit * std::abs(loss));
}

double gradient_tolerance(const HeadSize& size, double logit_bound) {
  return 2 * (softmax_error(size, logit_bound) + sum_error(std::max(size.vocab, size.tokens)));
}

std::vector<double> curve_tolerances(const HeadSize& size, std::span<const StepBounds> steps) {
  std::vector<double> tolerances;
  double drift = 0.0;
  for (const StepBounds& step : steps) {
    tolerances.push_back(loss_tolerance(size, step.loss, step.logit_bound) + drift);
    drift += 2 * gradient_tolerance(size, step.logit_bound) * step.learning_rate * step.gradient_norm;
  }
  return tolerances;
}

double Agreement::largest_difference() const {
  return difference.empty() ? 0.0 : *std::max_element(difference.begin(), difference.end());
}

bool Agreement::holds() const {
  for (size_t step = 0; step < difference.size(); ++step) {
    if (!(difference[step] <= tolerance[step])) return false;
  }
  return d_hidden_difference <= gradient_tolerance && d_classifier_difference <= gradient_tolerance;
}

double relative_difference(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) throw std::invalid_argument("relative_difference: sizes differ");
  double difference = 0.0;
  double magnitude = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    magnitude += std::abs(static_cast<double>(b[i]));
  }
  if (difference == 0.0) return 0.0;
  return difference / magnitude;
}

}  // namespace logitless::train
