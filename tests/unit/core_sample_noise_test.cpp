// logitless_sample_noise_run: what it refuses. tests/property/sampling_test.cpp has its numbers.
#include <gtest/gtest.h>
#include <logitless/sampling.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>

namespace {

class SampleNoise : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(logitless_context_create(nullptr, &context_), LOGITLESS_OK);
    lists_.rows = 2;
    lists_.columns = 1;
    lists_.seed = &seed_;
    lists_.ids = ids_.data();
    lists_.noise = noise_.data();
  }
  void TearDown() override { logitless_context_destroy(context_); }

  void expect_refused(const std::string& message) {
    EXPECT_EQ(logitless_sample_noise_run(context_, &lists_, nullptr), LOGITLESS_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(logitless_last_error()), message);
    EXPECT_EQ(noise_, (std::array<float, 2>{7, 7}));
  }

  const int64_t seed_ = 1;
  const std::array<int64_t, 2> ids_{4, 5};
  std::array<float, 2> noise_{7, 7};
  logitless_sample_noise lists_{};
  logitless_context* context_ = nullptr;
};

TEST_F(SampleNoise, ListsWithoutIdsAreFine) {
  lists_.columns = 0;
  lists_.ids = nullptr;
  EXPECT_EQ(logitless_sample_noise_run(context_, &lists_, nullptr), LOGITLESS_OK);
  EXPECT_EQ(noise_, (std::array<float, 2>{7, 7}));
}

TEST_F(SampleNoise, RefusesWhatIsWrongAndWritesNothing) {
  lists_.rows = -1;
  expect_refused("rows: expected at least 0, got -1");
  lists_.rows = 2;
  lists_.columns = std::numeric_limits<int64_t>::max() / 2 + 1;
  expect_refused("columns: expected fewer than 2^63 ids in all rows, got 4611686018427387904");
  lists_.columns = 1;
  lists_.sample = -1;
  expect_refused("sample: expected at least 0, got -1");
  lists_.sample = 0;
  lists_.has_seeds_of_rows = 2;
  expect_refused("has_seeds_of_rows: expected 0 or 1, got 2");
  lists_.has_seeds_of_rows = 0;
  lists_.seed = nullptr;
  expect_refused("seed: expected a pointer, got null");
  lists_.seed = &seed_;
  lists_.ids = nullptr;
  expect_refused("ids: expected a pointer, got null");
  lists_.ids = ids_.data();
  lists_.noise = nullptr;
  expect_refused("noise: expected a pointer, got null");
  EXPECT_EQ(logitless_sample_noise_run(context_, nullptr, nullptr), LOGITLESS_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(logitless_last_error()), "lists: expected a pointer, got null");
}

}  // namespace
