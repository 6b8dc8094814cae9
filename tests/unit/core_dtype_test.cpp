#include "core/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "formats.h"
#include "random.h"

namespace logitless {
namespace {

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

// NaN stays NaN, whatever its bits.
void expect_rounding(float value) {
  uint16_t expected = 0;
  logitless_test::store(&expected, LOGITLESS_F16, 0, value);
  ASSERT_TRUE(float_to_f16(value) == expected ||
              (std::isnan(value) && std::isnan(f16_to_float(float_to_f16(value)))))
      << value;
  logitless_test::store(&expected, LOGITLESS_BF16, 0, value);
  ASSERT_TRUE(float_to_bf16(value) == expected ||
              (std::isnan(value) && std::isnan(bf16_to_float(float_to_bf16(value)))))
      << value;
}

TEST(DType, EverySixteenBitNumberIsReadAndWritten) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    ASSERT_TRUE(same(f16_to_float(half), logitless_test::load(&half, LOGITLESS_F16, 0))) << bits;
    ASSERT_TRUE(same(bf16_to_float(half), logitless_test::load(&half, LOGITLESS_BF16, 0))) << bits;
    expect_rounding(f16_to_float(half));
    expect_rounding(bf16_to_float(half));
  }
}

// Covers all signs, exponents and leading fraction bits, with low bits around the ties of both formats.
TEST(DType, RoundsToNearestEven) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (uint32_t low :
         {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      expect_rounding(std::bit_cast<float>(high << 16 | low));
    }
  }
  logitless_test::Random random(1);
  for (int i = 0; i < 200'000; ++i)
    expect_rounding(std::bit_cast<float>(static_cast<uint32_t>(random.bits())));
}

}  // namespace
}  // namespace logitless
