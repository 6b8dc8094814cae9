// logitless_scale_gradients: several arrays at once, factors and elements that are 0, and refusals.
#include <gtest/gtest.h>
#include <logitless/logitless.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace {

class ScaleGradients : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(logitless_context_create(nullptr, &context_), LOGITLESS_OK); }
  void TearDown() override { logitless_context_destroy(context_); }

  logitless_status scale(const void* factor) {
    return logitless_scale_gradients(context_, static_cast<int32_t>(data_.size()), data_.data(),
                                     dtypes_.data(), sizes_.data(), factor, nullptr);
  }

  void expect_refused(const std::string& message) {
    const float factor = 2;
    EXPECT_EQ(scale(&factor), LOGITLESS_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(logitless_last_error()), message);
  }

  std::array<float, 3> floats_{1.5f, 0, -2};
  std::array<uint16_t, 2> halves_{0x3c00, 0x8000};  // float16's 1 and -0
  std::vector<float> many_ = std::vector<float>(200'000, 3);
  std::vector<void*> data_{floats_.data(), halves_.data(), nullptr, many_.data()};
  std::vector<int32_t> dtypes_{LOGITLESS_F32, LOGITLESS_F16, LOGITLESS_BF16, LOGITLESS_F32};
  std::vector<int64_t> sizes_{3, 2, 0, 200'000};
  logitless_context* context_ = nullptr;
};

TEST_F(ScaleGradients, EveryArrayIsScaled) {
  const float factor = 4;
  ASSERT_EQ(scale(&factor), LOGITLESS_OK) << logitless_last_error();
  EXPECT_EQ(floats_, (std::array<float, 3>{6, 0, -8}));
  EXPECT_EQ(halves_, (std::array<uint16_t, 2>{0x4400, 0x8000}));
  EXPECT_EQ(many_, std::vector<float>(200'000, 12));
}

TEST_F(ScaleGradients, ZerosStayZero) {
  for (const float factor : {HUGE_VALF, std::numeric_limits<float>::quiet_NaN()}) {
    floats_ = {1, 0, -1};
    ASSERT_EQ(scale(&factor), LOGITLESS_OK) << logitless_last_error();
    EXPECT_FALSE(std::isfinite(floats_[0]));
    EXPECT_EQ(floats_[1], 0);
    EXPECT_FALSE(std::isfinite(floats_[2]));
    EXPECT_EQ(halves_[1], 0x8000);
  }
}

TEST_F(ScaleGradients, Float64ArraysHaveAFactorOfTheirOwn) {
  std::array<double, 2> doubles{1.5, 0};
  data_ = {doubles.data()}, dtypes_ = {LOGITLESS_F64}, sizes_ = {2};
  const double factor = 1 + 0x1p-40;
  ASSERT_EQ(scale(&factor), LOGITLESS_OK) << logitless_last_error();
  EXPECT_EQ(doubles[0], 1.5 * factor);
  EXPECT_EQ(doubles[1], 0);
}

TEST_F(ScaleGradients, NoArraysAreFine) {
  EXPECT_EQ(logitless_scale_gradients(context_, 0, nullptr, nullptr, nullptr, nullptr, nullptr),
            LOGITLESS_OK);
}

TEST_F(ScaleGradients, RefusesWhatIsWrongAndWritesNothing) {
  dtypes_[3] = LOGITLESS_I64;
  expect_refused("dtypes[3]: expected a floating point dtype, got 5");
  dtypes_[3] = LOGITLESS_F64;
  expect_refused("dtypes[3]: expected float64 for all arrays or for none, got 3");
  dtypes_[3] = LOGITLESS_F32;
  sizes_[3] = -1;
  expect_refused("sizes[3]: expected at least 0, got -1");
  sizes_[3] = 1, data_[3] = nullptr;
  expect_refused("data[3]: expected a pointer, got null");
  data_[3] = many_.data();
  EXPECT_EQ(scale(nullptr), LOGITLESS_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(logitless_last_error()), "factor: expected a pointer, got null");
  EXPECT_EQ(logitless_scale_gradients(context_, -1, nullptr, nullptr, nullptr, nullptr, nullptr),
            LOGITLESS_INVALID_ARGUMENT);
  EXPECT_EQ(floats_[0], 1.5f);
}

}  // namespace
