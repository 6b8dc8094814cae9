#pragma once
#include <gtest/gtest.h>

#include <vector>

#include "case.h"
#include "engine.h"
#include "oracle.h"
#include "solve.h"

namespace logitless_test {

// How far a result may be off before it is rounded to the dtype of its output.
struct Bounds {
  double lse = 0, nll = 0, entropy = 0, logit = 0, mean_logit = 0, log_sum_sq_probs = 0, loss = 0;
  double d_hidden = 0, d_weight = 0, d_bias = 0;
};

// Each of them.
inline constexpr double Bounds::*kBounds[] = {&Bounds::lse,   &Bounds::nll,        &Bounds::entropy,
                                              &Bounds::logit, &Bounds::mean_logit, &Bounds::log_sum_sq_probs,
                                              &Bounds::loss,  &Bounds::d_hidden,   &Bounds::d_weight,
                                              &Bounds::d_bias};

Bounds operator*(double factor, const Bounds& bounds);
Bounds operator+(const Bounds& a, const Bounds& b);
// Of each the larger.
Bounds either(const Bounds& a, const Bounds& b);

// What the arithmetic of an engine rounds, beside what the naive computation of the same precision does.
struct Arithmetic {
  double gradient = 0;         // relative error of one rounding of the gradient of a logit
  double logit_roundings = 1;  // of the largest term of a logit, in units of the statistics' dtype
  double exp = 0;              // relative error of an exponential
};

// The truth about a case, and its fair error:
//   2 x (largest error of the naive computation of the same precision, over that result)
//   + one rounding of the largest term behind the result, in the format of the arithmetic.
class Expected {
 public:
  explicit Expected(const Case& c);

  const Answer& truth() const { return truth_; }

  // Of the arithmetic of an engine, with row statistics that are rounded on their way to the gradients.
  Bounds bounds_of(const Engine& engine) const;
  // The reference backend computes in double, so only its outputs are rounded; but not where a backward pass
  // begins from a rounded lse.
  Bounds tightest_bounds_of(const Engine& engine) const;

  // Every output of a run. Failures name output, index, got, expected and the bound.
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
  Answer naive_short_;       // the gradient of the logits rounded; only of 16-bit operands of one format
  Answer naive_exp_logits_;  // kept exponentials rounded; only of bfloat16 operands, with engines on a device
};

// |got - expected| <= error + one rounding of expected to the dtype; NaN matches NaN.
bool is_close(double got, double expected, double error, logitless_dtype dtype);
// Element by element.
testing::AssertionResult close(const char* what, const std::vector<double>& got,
                               const std::vector<double>& expected, double error, logitless_dtype dtype);

// Those of a run; of an Answer, or of other Outputs.
template <class Gradients>
void expect_gradients(const Outputs& got, const Gradients& expected, const Bounds& bounds,
                      logitless_dtype dtype = LOGITLESS_F32) {
  EXPECT_TRUE(close("d_hidden", got.d_hidden, expected.d_hidden, bounds.d_hidden, dtype));
  EXPECT_TRUE(close("d_weight", got.d_weight, expected.d_weight, bounds.d_weight, dtype));
  EXPECT_TRUE(close("d_bias", got.d_bias, expected.d_bias, bounds.d_bias, dtype));
}

// Two runs agree in losses and gradients, each with its own error; per-row outputs must be in the same order.
void expect_same_results(const Case& c, const Outputs& a, const Outputs& b, const Bounds& bounds);

}  // namespace logitless_test
