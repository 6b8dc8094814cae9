// Refusals of logitless_divergence_run. tests/property tests its numbers on every engine.
#include <gtest/gtest.h>
#include <logitless/divergence.h>

#include <functional>
#include <string>
#include <vector>

namespace {

struct BadRun {
  const char* message;
  std::function<void(logitless_divergence&)> spoil;
};

TEST(Divergence, EveryInvalidArgumentIsNamed) {
  using D = logitless_divergence;
  std::vector<float> values(30);
  D valid;
  logitless_divergence_init(&valid);
  valid.rows = 3;
  valid.columns = 10;
  valid.beta = 0.5;
  valid.student = valid.teacher = values.data();
  const BadRun runs[] = {
      {"beta: expected 0, or a number in [2^-100, 1], got -0.5", [](D& d) { d.beta = -0.5; }},
      {"temperature: expected a finite number > 0, got 0", [](D& d) { d.temperature = 0; }},
      {"columns: expected at least 1, got 0", [](D& d) { d.columns = 0; }},
      {"teacher_stride: expected 0 or at least columns, got 5", [](D& d) { d.teacher_stride = 5; }},
      {"student: expected a pointer, got null", [](D& d) { d.student = nullptr; }},
      {"student_lse: expected a pointer, got null", [](D&) {}},
      {"dtype: expected float32 or float64, got bfloat16", [](D& d) { d.dtype = LOGITLESS_BF16; }},
      {"stage: expected 0 to 3, got 4", [](D& d) { d.stage = 4; }},
      {"columns: expected at least 0, got -1",
       [](D& d) {
         d.stage = LOGITLESS_DIVERGENCE_SUMS;
         d.columns = -1;
       }},
      {"student_kl: expected a pointer, got null", [](D& d) {
         d.stage = LOGITLESS_DIVERGENCE_TERMS;
         d.student_lse = d.teacher_lse = d.entropy = const_cast<void*>(d.student);
       }}};
  logitless_context* context = nullptr;
  ASSERT_EQ(logitless_context_create(nullptr, &context), LOGITLESS_OK);
  for (const BadRun& run : runs) {
    D d = valid;
    run.spoil(d);
    EXPECT_EQ(logitless_divergence_run(context, &d, nullptr), LOGITLESS_INVALID_ARGUMENT);
    EXPECT_STREQ(logitless_last_error(), run.message);
  }
  logitless_context_destroy(context);
}

}  // namespace
