// logitless_divergence_run on host memory: every instruction set beside the reference, and what is refused.
#include <gtest/gtest.h>
#include <logitless/divergence.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int64_t kRows = 3, kColumns = 1029, kStride = 1031;  // blocks of 512 columns, and some

struct Found {
  std::vector<float> student_lse, teacher_lse, student_kl, divergence, entropy, gradient;
};

class DivergenceRows : public ::testing::Test {
 protected:
  void SetUp() override {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (std::vector<float>* values : {&student_, &teacher_, &student_bias_, &teacher_bias_, &grad_}) {
      for (float& x : *values) x = 2 * normal(random);
    }
    student_bias_[7] = teacher_bias_[7] = student_bias_[1024] = -std::numeric_limits<float>::infinity();
  }

  // In float32, unless the backend is the reference.
  Found run(const char* backend, const char* isa, double beta, double softcap) {
    logitless_context_options options;
    logitless_context_options_init(&options);
    options.backend = backend;
    options.isa = isa;
    logitless_context* context = nullptr;
    EXPECT_EQ(logitless_context_create(&options, &context), LOGITLESS_OK) << logitless_last_error();
    Found found;
    for (auto* numbers :
         {&found.student_lse, &found.teacher_lse, &found.student_kl, &found.divergence, &found.entropy}) {
      numbers->resize(kRows);
    }
    found.gradient = student_;  // in place
    logitless_divergence d = problem(beta, softcap);
    d.student = d.d_logits = found.gradient.data();
    d.student_lse = found.student_lse.data();
    d.teacher_lse = found.teacher_lse.data();
    d.student_kl = found.student_kl.data();
    d.divergence = found.divergence.data();
    d.entropy = found.entropy.data();
    d.grad = grad_.data();
    for (const int32_t stage : {LOGITLESS_DIVERGENCE_VALUES, LOGITLESS_DIVERGENCE_GRADIENT}) {
      d.stage = stage;
      EXPECT_EQ(logitless_divergence_run(context, &d, nullptr), LOGITLESS_OK) << logitless_last_error();
    }
    logitless_context_destroy(context);
    return found;
  }

  logitless_divergence problem(double beta, double softcap) {
    logitless_divergence d;
    logitless_divergence_init(&d);
    d.rows = kRows;
    d.columns = kColumns;
    d.beta = beta;
    d.temperature = 0.8;
    d.student_scale = 0.5;
    d.student_softcap = softcap;
    d.teacher = teacher_.data();
    d.student_stride = d.teacher_stride = d.d_logits_stride = kStride;
    d.student_bias = student_bias_.data();
    d.teacher_bias = teacher_bias_.data();
    return d;
  }

  std::vector<float> student_ = std::vector<float>(kRows * kStride), teacher_ = student_;
  std::vector<float> student_bias_ = std::vector<float>(kColumns), teacher_bias_ = student_bias_;
  std::vector<float> grad_ = std::vector<float>(kRows);
};

void expect_near(const std::vector<float>& got, const std::vector<float>& expected, float error) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]))) continue;
    ASSERT_NEAR(got[i], expected[i], error) << i;
  }
}

TEST_F(DivergenceRows, EveryInstructionSetIsNearTheReference) {
  std::vector<std::string> sets;
  for (const char* isa : {"avx512", "avx2", "neon", "portable"}) {
    logitless_context_options options;
    logitless_context_options_init(&options);
    options.isa = isa;
    logitless_context* context = nullptr;
    if (logitless_context_create(&options, &context) == LOGITLESS_OK) sets.emplace_back(isa);
    logitless_context_destroy(context);
  }
  ASSERT_FALSE(sets.empty());
  grad_[1] = 0;
  for (const double beta : {0.0, 0x1p-100, 0.3, 1 - 0x1p-40, 1.0}) {
    for (const double softcap : {0.0, 5.0}) {
      const Found exact = run("reference", nullptr, beta, softcap);
      for (const std::string& isa : sets) {
        SCOPED_TRACE(isa + " beta " + std::to_string(beta) + " softcap " + std::to_string(softcap));
        const Found found = run("cpu", isa.c_str(), beta, softcap);
        // Logits of up to 12 and lse of up to 15, each with a rounding of 2^-21.
        constexpr float kError = 0x1p-19f;
        expect_near(found.student_lse, exact.student_lse, kError);
        expect_near(found.teacher_lse, exact.teacher_lse, kError);
        expect_near(found.student_kl, exact.student_kl, 4 * kError);
        expect_near(found.divergence, exact.divergence, 4 * kError);
        expect_near(found.entropy, exact.entropy, 16 * kError);
        expect_near(found.gradient, exact.gradient, 16 * kError);
        for (int64_t j = 0; j < kColumns; ++j) ASSERT_EQ(found.gradient[static_cast<size_t>(kStride + j)], 0);
      }
    }
  }
}

TEST_F(DivergenceRows, WhatIsRefused) {
  logitless_context* context = nullptr;
  ASSERT_EQ(logitless_context_create(nullptr, &context), LOGITLESS_OK);
  const auto expect_refused = [&](const logitless_divergence& d, const std::string& message) {
    EXPECT_EQ(logitless_divergence_run(context, &d, nullptr), LOGITLESS_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(logitless_last_error()), message);
  };
  const logitless_divergence valid = problem(0.5, 0);
  logitless_divergence d = valid;
  d.beta = -0.5;
  expect_refused(d, "beta: expected 0, or a number in [2^-100, 1], got -0.5");
  d = valid;
  d.temperature = 0;
  expect_refused(d, "temperature: expected a finite number > 0, got 0");
  d = valid;
  d.columns = 0;
  expect_refused(d, "columns: expected at least 1, got 0");
  d = valid;
  d.teacher_stride = 5;
  d.student = student_.data();
  expect_refused(d, "teacher_stride: expected 0 or at least columns, got 5");
  expect_refused(valid, "student: expected a pointer, got null");
  d = valid;
  d.student = student_.data();
  expect_refused(d, "student_lse: expected a pointer, got null");
  d.dtype = LOGITLESS_BF16;
  expect_refused(d, "dtype: expected float32 or float64, got bfloat16");
  d.stage = 2;
  expect_refused(d, "stage: expected 0 to 1, got 2");
  logitless_context_destroy(context);
}

}  // namespace
