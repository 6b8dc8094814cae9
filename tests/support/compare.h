#pragma once
#include <gtest/gtest.h>

#include <vector>

#include "case.h"
#include "engine.h"
#include "oracle.h"
#include "solve.h"

namespace logitless_test {

// The error that a result may have before it is rounded to the dtype of its output.
struct Bounds {
  double lse = 0, nll = 0, entropy = 0, logit = 0, mean_logit = 0, log_sum_sq_probs = 0, loss = 0;
  double d_hidden = 0, d_weight = 0, d_bias = 0;
};

// All members of Bounds.
inline constexpr double Bounds::*kBounds[] = {&Bounds::lse,   &Bounds::nll,        &Bounds::entropy,
                                              &Bounds::logit, &Bounds::mean_logit, &Bounds::log_sum_sq_probs,
                                              &Bounds::loss,  &Bounds::d_hidden,   &Bounds::d_weight,
                                              &Bounds::d_bias};

Bounds operator*(double factor, const Bounds& bounds);
Bounds operator+(const Bounds& a, const Bounds& b);
// The larger of the two for each member.
Bounds either(const Bounds& a, const Bounds& b);

// Roundings of an engine's arithmetic beyond those of the naive computation of the same precision.
struct Arithmetic {
  double gradient = 0;         // relative error of one rounding of the gradient of a logit
  double logit_roundings = 1;  // roundings of the largest term of a logit, in units of the statistics' dtype
  double exp = 0;              // relative error of an exponential
};

// The truth about a case, and its fair error:
//   2 x (largest error of the naive computation of the same precision, over that result)
//   + one rounding of the largest term behind the result, in the format of the arithmetic.
class Expected {
 public:
  explicit Expected(const Case& c);

  const Answer& truth() const { return truth_; }

  // Bounds for an engine's arithmetic, with row statistics that are rounded on their way to the gradients.
  Bounds bounds_of(const Engine& engine) const;
  // The reference backend computes in double, so its bounds cover the rounding of outputs only. Gradients
  // have bounds_of() where a backward pass begins from a rounded lse.
  Bounds tightest_bounds_of(const Engine& engine) const;

  // Checks every output of a run. Failures name output, index, got, expected and the bound.
  void check(const Engine& engine, const Outputs& got) const { check(got, tightest_bounds_of(engine)); }
  void check(const Outputs& got, const Bounds& bounds) const;

 private:
  Arithmetic arithmetic_of(const Engine& engine) const;
  Bounds bounds(const Answer& naive, const Arithmetic& arithmetic) const;
  Bounds bounds_of_double() const;
  void check_argmax(const Outputs& got, double logit_error) const;
  void check_target_log_probs(const Outputs& got, double error) const;
  void check_top(const Outputs& got, const Bounds& bounds) const;

  const Case& c_;
  Answer truth_, naive_;
  Answer naive_short_;       // rounds the logits' gradient; only for 16-bit operands of one format
  Answer naive_exp_logits_;  // rounds kept exponentials; only for bfloat16 operands on a device's engines
};

// |got - expected| <= error + one rounding of expected to the dtype; NaN matches NaN.
bool is_close(double got, double expected, double error, logitless_dtype dtype);
// Compares element by element.
testing::AssertionResult close(const char* what, const std::vector<double>& got,
                               const std::vector<double>& expected, double error, logitless_dtype dtype);

// Compares the gradients of a run with those of an Answer, or of other Outputs.
template <class Gradients>
void expect_gradients(const Outputs& got, const Gradients& expected, const Bounds& bounds,
                      logitless_dtype dtype = LOGITLESS_F32) {
  EXPECT_TRUE(close("d_hidden", got.d_hidden, expected.d_hidden, bounds.d_hidden, dtype));
  EXPECT_TRUE(close("d_weight", got.d_weight, expected.d_weight, bounds.d_weight, dtype));
  EXPECT_TRUE(close("d_bias", got.d_bias, expected.d_bias, bounds.d_bias, dtype));
}

// Expects two runs to agree in losses and gradients, each with its own error. Per-row outputs must be in the
// same order.
void expect_same_results(const Case& c, const Outputs& a, const Outputs& b, const Bounds& bounds);

}  // namespace logitless_test
