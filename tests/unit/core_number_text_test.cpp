#include "core/number_text.h"

#include <gtest/gtest.h>

#include <locale>

namespace logitless {
namespace {

class Commas : public std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

class NumberText : public testing::Test {
 protected:
  void SetUp() override { before_ = std::locale::global(std::locale(std::locale(), new Commas)); }
  void TearDown() override { std::locale::global(before_); }
  std::locale before_;
};

TEST_F(NumberText, HasAPointAndNoGroupsWhateverTheGlobalLocale) {
  EXPECT_EQ(number_text(1234567.5), "1234567.5");
  EXPECT_EQ(number_text(-0.125), "-0.125");
  EXPECT_EQ(number_text(0x1p-126), "1.17549435e-38");
  EXPECT_EQ(fixed_text(1234.56, 1), "1234.6");
  EXPECT_EQ(fixed_text(3, 2), "3.00");
}

}  // namespace
}  // namespace logitless
