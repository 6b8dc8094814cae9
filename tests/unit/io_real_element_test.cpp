#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "io/tensor.h"

namespace logitless::cli {
namespace {

TEST(RealElement, F16RoundTripsEveryBitPattern) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = f16_to_float(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(value))));
    } else {
      EXPECT_EQ(float_to_f16(value), half);
    }
  }
}

TEST(RealElement, Bf16RoundTripsEveryBitPattern) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = bf16_to_float(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(value))));
    } else {
      EXPECT_EQ(float_to_bf16(value), half);
    }
  }
}

TEST(RealElement, NarrowingRoundsToNearestEven) {
  EXPECT_EQ(f16_to_float(float_to_f16(1 + 0x1p-11F)), 1);               // a tie goes to the even neighbor
  EXPECT_EQ(f16_to_float(float_to_f16(1 + 0x3p-11F)), 1 + 0x1p-9F);     // up to the even neighbor
  EXPECT_EQ(f16_to_float(float_to_f16(1 + 0x1.8p-11F)), 1 + 0x1p-10F);  // past the tie
  EXPECT_EQ(f16_to_float(float_to_f16(65519.0F)), 65504);
  EXPECT_TRUE(std::isinf(f16_to_float(float_to_f16(65520.0F))));
  EXPECT_EQ(float_to_f16(0x1p-25F), 0);  // half of the smallest: to even
  EXPECT_EQ(float_to_f16(0x1.8p-25F), 1);
  EXPECT_EQ(float_to_f16(-0.0F), 0x8000);
  EXPECT_EQ(float_to_f16(0x1p-149F), 0);
  EXPECT_EQ(bf16_to_float(float_to_bf16(1 + 0x1p-8F)), 1);
  EXPECT_EQ(bf16_to_float(float_to_bf16(1 + 0x3p-8F)), 1 + 0x1p-6F);
  EXPECT_TRUE(std::isinf(bf16_to_float(float_to_bf16(std::numeric_limits<float>::max()))));
}

TEST(RealElement, ReadsEveryIntegerType) {
  const int64_t minus_one = -1;
  const auto read = [&](ElementType type) {
    return integer_element(reinterpret_cast<const std::byte*>(&minus_one), type, 0);
  };
  EXPECT_EQ(read(ElementType::kI8), -1);
  EXPECT_EQ(read(ElementType::kI16), -1);
  EXPECT_EQ(read(ElementType::kI32), -1);
  EXPECT_EQ(read(ElementType::kI64), -1);
  EXPECT_EQ(read(ElementType::kU8), 0xff);
  EXPECT_EQ(read(ElementType::kU16), 0xffff);
  EXPECT_EQ(read(ElementType::kU32), 0xffffffff);
  EXPECT_EQ(read(ElementType::kU64), INT64_MAX);
}

}  // namespace
}  // namespace logitless::cli
