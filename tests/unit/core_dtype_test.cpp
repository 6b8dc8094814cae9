#include "core/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "formats.h"
#include "random.h"

namespace logitless {
namespace {

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

TEST(DType, EverySixteenBitNumberIsRead) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    ASSERT_TRUE(same(f16_to_float(half), logitless_test::load(&half, LOGITLESS_F16, 0))) << bits;
    ASSERT_TRUE(same(bf16_to_float(half), logitless_test::load(&half, LOGITLESS_BF16, 0))) << bits;
  }
}

TEST(DType, EverySixteenBitNumberSurvivesARoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    if (!std::isnan(f16_to_float(half))) {
      ASSERT_EQ(float_to_f16(f16_to_float(half)), half);
    } else {
      ASSERT_TRUE(std::isnan(f16_to_float(float_to_f16(f16_to_float(half)))));
    }
    if (!std::isnan(bf16_to_float(half))) {
      ASSERT_EQ(float_to_bf16(bf16_to_float(half)), half);
    } else {
      ASSERT_TRUE(std::isnan(bf16_to_float(float_to_bf16(bf16_to_float(half)))));
    }
  }
}

void expect_rounding(float value) {
  if (std::isnan(value)) return;
  uint16_t expected = 0;
  logitless_test::store(&expected, LOGITLESS_F16, 0, value);
  ASSERT_EQ(float_to_f16(value), expected) << value;
  logitless_test::store(&expected, LOGITLESS_BF16, 0, value);
  ASSERT_EQ(float_to_bf16(value), expected) << value;
}

// All signs, exponents and leading fraction bits, with low bits around the ties of both formats.
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

TEST(DType, StoresAndLoadsEachDtype) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kI32, DType::kI64}) {
    alignas(8) unsigned char memory[24] = {};
    store_from_double(memory, dtype, 1, -3);
    EXPECT_EQ(load_as_double(memory, dtype, 1), -3) << dtype_name(dtype);
    EXPECT_EQ(load_as_double(memory, dtype, 0), 0);
    EXPECT_EQ(load_as_double(memory, dtype, 2), 0);
  }
}

TEST(DType, LoadsTargets) {
  const int32_t narrow[] = {-100, 7};
  const int64_t wide[] = {-100, int64_t{1} << 40};
  EXPECT_EQ(load_as_int64(narrow, DType::kI32, 0), -100);
  EXPECT_EQ(load_as_int64(narrow, DType::kI32, 1), 7);
  EXPECT_EQ(load_as_int64(wide, DType::kI64, 1), int64_t{1} << 40);
}

}  // namespace
}  // namespace logitless
