// dz where rounding would take it away. tests/property tests, with every option, that the coefficients are
// the loss's derivative.
#include "core/row_coefficients.h"

#include <gtest/gtest.h>

#include <cmath>

namespace logitless {
namespace {

// At p = 0 no term is 0 times an infinity, for the target and for others, whatever coefficients are 0.
TEST(RowCoefficients, MaskedColumnsHaveFiniteGradients) {
  for (double a : {0.0, 0.5}) {
    for (double b : {0.0, -0.25}) {
      for (double g : {0.0, 0.5, 2.0}) {
        const RowCoefficients<double> k{a, b, 0, g};
        EXPECT_EQ(dz_element<double>(k, -INFINITY, 1.0, 1), -g);
        EXPECT_EQ(dz_element<double>(k, -INFINITY, 1.0, 0), 0);
        EXPECT_EQ(dz_element(k, -1e5, 1.0, 0), 0);
      }
    }
  }
}

TEST(RowCoefficients, ACertainTargetKeepsItsDigits) {
  const RowCoefficients<double> k{0.5, 0, 0, 0.5};
  EXPECT_NEAR(dz_element(k, -1e-20, 1.0, 1), -0.5e-20, 1e-34);
}

}  // namespace
}  // namespace logitless
