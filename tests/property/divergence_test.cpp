// logitless_divergence_run on every engine beside float64: any shape and layout, windows of columns, and
// values that are hard for a softmax.
#include "divergence_fixture.h"
#include "engine_test.h"

namespace logitless_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kBetas[] = {0, 0x1p-100, 0.1, 0.5, 0.999, 1 - 0x1p-40, 1};

class Divergences : public testing::TestWithParam<Engine> {
 protected:
  RowOutputs run(const TwoHeads& p) const { return RowsRun(p).on(GetParam()); }
  void check(const TwoHeads& p) const {
    SCOPED_TRACE("beta " + std::to_string(p.beta) + ", " + std::to_string(p.rows) + " x " +
                 std::to_string(p.columns));
    expect_near_truth(p, run(p));
  }
};

TEST_P(Divergences, EveryBeta) {
  for (const double beta : kBetas) {
    TwoHeads p = random_heads(1, 3, 1029);
    p.beta = beta;
    p.grad[1] = 0;
    check(p);
    const RowOutputs got = run(p);
    EXPECT_TRUE(all_are(0, rows_of(got.gradient, 3, {1})));
  }
}

TEST_P(Divergences, WithEveryTransform) {
  for (const double beta : {0.0, 0.3, 1.0}) {
    for (const int transforms : {1, 2, 4, 7}) {
      TwoHeads p = random_heads(2, 2, 700);
      p.beta = beta;
      if ((transforms & 1) != 0) {
        p.student.scale = 0.7;
        p.teacher.scale = -1.3;
        p.temperature = 1.7;
      }
      if ((transforms & 2) != 0) p.student.bias = random_bias(3, 700);
      if ((transforms & 2) != 0) p.teacher.bias = random_bias(4, 700);
      if ((transforms & 4) != 0) p.student.softcap = 3;
      if ((transforms & 4) != 0) p.teacher.softcap = 5;
      check(p);
    }
    TwoHeads flat = random_heads(2, 2, 700);
    flat.beta = beta;
    flat.student.scale = 0;
    check(flat);
  }
}

TEST_P(Divergences, AnyShape) {
  const int64_t shapes[][2] = {{1, 1},    {1, 2},    {5, 3},    {2, 7},   {1, 511},
                               {2, 2047}, {1, 2049}, {2, 4097}, {1, 9001}};
  for (const auto& shape : shapes) {
    for (const double beta : {0.0, 0.4, 1.0}) {
      TwoHeads p = random_heads(5, shape[0], shape[1]);
      p.beta = beta;
      check(p);
    }
  }
  EXPECT_TRUE(run(random_heads(6, 0, 9)).divergence.empty());
}

// Rows that begin anywhere have the same bits as those that begin where loads are wide.
TEST_P(Divergences, RowsBeginAnywhere) {
  for (const logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}) {
    TwoHeads p = random_heads(7, 3, 4104);
    p.gradient_dtype = dtype;
    check(p);
    const RowOutputs expected = run(p);
    for (const int64_t skew : {1, 2, 3}) {
      p.student_layout = {skew, skew};
      p.teacher_layout = {4, 3 - skew};
      p.gradient_layout = {skew - 1, 4 - skew};
      const RowOutputs got = run(p);
      EXPECT_EQ(difference(got, expected), "") << skew;
    }
  }
}

TEST_P(Divergences, InPlaceAndInWindowsTheGradientIsTheSame) {
  for (const double beta : {0.0, 0.4, 1.0}) {
    TwoHeads p = random_heads(8, 3, 5003);
    p.beta = beta;
    p.student.bias = random_bias(9, 5003);
    const RowOutputs expected = run(p);
    for (const int64_t window : {0, 1000, 2051, 4999}) {
      for (const bool in_place : {false, true}) {
        p.window = window;
        p.in_place = in_place;
        const RowOutputs got = run(p);
        EXPECT_EQ(difference(got, expected), "") << window << in_place;
      }
    }
  }
}

// Ranks that share a vocabulary merge their parts; one may have no columns, or none that is possible.
TEST_P(Divergences, ValuesFromPartsOfTheColumns) {
  for (const double beta : kBetas) {
    for (const bool is_masked : {false, true}) {
      TwoHeads p = random_heads(19, 3, 4700);
      p.beta = beta;
      p.student.softcap = 6;
      p.teacher.scale = 1.5;
      p.student.bias = random_bias(20, 4700);
      if (is_masked) {
        p.student.softcap = 0;
        p.teacher.bias = p.student.bias;
        for (size_t j = 4000; j < 4700; ++j) p.student.bias[j] = p.teacher.bias[j] = -kInfinity;
      }
      for (const auto& sizes : {std::vector<int64_t>{4700}, {0, 4000, 700}, {17, 1, 2982, 1000, 0, 700}}) {
        SCOPED_TRACE("beta " + std::to_string(beta) + ", " + std::to_string(sizes.size()) + " parts");
        expect_near_truth(p, values_from_parts(p, sizes, [&](const TwoHeads& part) { return run(part); }));
      }
    }
  }
}

TEST_P(Divergences, SameBitsEveryTime) {
  const TwoHeads p = random_heads(10, 4, 6001);
  const RowOutputs first = run(p);
  for (int again = 0; again < 3; ++again) EXPECT_EQ(difference(run(p), first), "");
}

// A row's numbers do not depend on the rows beside it.
TEST_P(Divergences, ARowAlone) {
  const TwoHeads p = random_heads(11, 3, 2500);
  const RowOutputs all = run(p);
  TwoHeads one = p;
  one.rows = 1;
  for (Head* head : {&one.student, &one.teacher}) head->products = rows_of(head->products, 3, {1});
  one.grad = {p.grad[1]};
  const RowOutputs alone = run(one);
  for (const OutputNumber& each : kOutputs) {
    EXPECT_TRUE(same_bits(alone.*each.values, rows_of(all.*each.values, 3, {1}))) << each.name;
  }
}

TEST_P(Divergences, EqualHeadsGiveZero) {
  for (const double beta : kBetas) {
    TwoHeads p = random_heads(12, 3, 3000, 5);
    p.teacher = p.student;
    p.beta = beta;
    const RowOutputs got = run(p);
    for (const auto* values : {&got.divergence, &got.student_kl, &got.gradient}) {
      EXPECT_TRUE(all_are(0, *values));
    }
  }
}

// An error of a log ratio changes the divergence by about |p - q| times it. Errors of probabilities are
// independent of each other, and change it by the root of the sum of their squares.
TEST_P(Divergences, NearlyEqualHeads) {
  for (const double beta : {0.0, 0.1, 0.5, 0.9, 1.0}) {
    for (const double apart : {1e-2, 1e-3, 1e-5}) {
      TwoHeads p = random_heads(13, 4, 5000);
      p.beta = beta;
      for (size_t i = 0; i < p.student.products.size(); ++i) {
        p.teacher.products[i] = rounded(p.student.products[i] * (1 + apart), LOGITLESS_F32);
      }
      const RowOutputs got = run(p);
      for (int64_t i = 0; i < p.rows; ++i) {
        const PlainRow<double> truth(p, i);
        double distance = 0, squares = 0;
        for (size_t j = 0; j < truth.log_p.size(); ++j) {
          const double pj = std::exp(truth.log_p[j]), qj = std::exp(truth.log_q[j]);
          distance += std::fabs(pj - qj);
          squares += pj * pj + qj * qj;
        }
        const double unit = 0x1p-23 * (4 + truth.size);
        EXPECT_NEAR(got.divergence[static_cast<size_t>(i)], truth.divergence,
                    2 * unit * distance + 0x1p-21 * std::sqrt(squares) + 0x1p-18 * truth.divergence)
            << "beta " << beta << " apart " << apart;
      }
    }
  }
}

TEST_P(Divergences, HugeLogits) {
  for (const double beta : {0.0, 0.1, 0.5, 1.0}) {
    TwoHeads p = random_heads(14, 3, 3000, 1e4);
    p.beta = beta;
    check(p);
    for (double& x : p.student.products) x = std::fabs(x) / 1e4 + 1e4;  // all far from 0
    check(p);
  }
}

// Biases of -inf, as for tokens that a model must not say.
TEST_P(Divergences, ExcludedColumns) {
  for (const double beta : {0.0, 0.1, 0.5, 1.0}) {
    for (const int who : {1, 2, 3}) {
      TwoHeads p = random_heads(15, 2, 2500);
      p.beta = beta;
      p.student.bias = p.teacher.bias = Values(2500, 0);
      for (size_t j = 0; j < 2500; j += j < 1200 ? 1 : 7) {
        if ((who & 1) != 0) p.student.bias[j] = -kInfinity;
        if ((who & 2) != 0) p.teacher.bias[j] = -kInfinity;
      }
      const bool is_infinite = (beta == 0 && who == 1) || (beta == 1 && who == 2);
      if (!is_infinite) check(p);
      const RowOutputs got = run(p);
      for (const double x : got.divergence) EXPECT_EQ(std::isinf(x), is_infinite) << beta << ' ' << who;
      for (size_t j = 0; beta != 1 && j < got.gradient.size(); ++j) {
        ASSERT_TRUE(std::isfinite(got.gradient[j])) << beta << ' ' << who << ' ' << j;
      }
    }
  }
}

TEST_P(Divergences, ANaNOrAnInfinityStaysInItsRow) {
  for (const double beta : {0.0, 0.5, 1.0}) {
    for (const double bad : {kNan, kInfinity}) {
      for (const bool is_student : {true, false}) {
        for (const int64_t column : {0, 2100, 2499}) {
          TwoHeads p = random_heads(16, 3, 2500);
          p.beta = beta;
          p.grad[2] = 0;
          const RowOutputs expected = run(p);
          Values& products = (is_student ? p.student : p.teacher).products;
          products[static_cast<size_t>(2500 + column)] = products[static_cast<size_t>(5000 + column)] = bad;
          const RowOutputs got = run(p);
          EXPECT_EQ(got.divergence[0], expected.divergence[0]);
          EXPECT_TRUE(std::isnan(got.divergence[1]) && std::isnan(got.divergence[2]));
          const auto gradient = [](const RowOutputs& of, size_t row) {
            return rows_of(of.gradient, 3, {row});
          };
          EXPECT_EQ(gradient(got, 0), gradient(expected, 0));
          EXPECT_TRUE(all_are(kNan, gradient(got, 1))) << beta << bad << is_student;
          EXPECT_TRUE(all_are(0, gradient(got, 2)));
        }
      }
    }
  }
}

TEST_P(Divergences, InFloat64) {
  if (!GetParam().has_float64()) GTEST_SKIP() << "no float64";
  for (const double beta : {0.0, 0.1, 1.0}) {
    TwoHeads p = random_heads(17, 2, 4700);
    p.dtype = p.gradient_dtype = LOGITLESS_F64;
    p.beta = beta;
    p.student.bias = random_bias(18, 4700);
    p.teacher.softcap = 7;
    check(p);
  }
}

LOGITLESS_TEST_ON(Divergences, engines());

}  // namespace
}  // namespace logitless_test
