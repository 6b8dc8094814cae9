// Refusals of logitless_candidates_run. tests/property tests its numbers on every engine.
#include <gtest/gtest.h>
#include <logitless/candidates.h>

#include <functional>
#include <string>
#include <vector>

namespace {

struct BadCandidates {
  const char* message;
  std::function<void(logitless_candidates&)> spoil;
};

TEST(Candidates, EveryInvalidArgumentIsNamed) {
  using C = logitless_candidates;
  alignas(64) static std::byte workspace[4096];
  std::vector<float> values(200);
  std::vector<int64_t> ids(12), offsets = {0, 4, 9, 12};
  C valid;
  logitless_candidates_init(&valid);
  valid.rows = 3;
  valid.hidden_size = 10;
  valid.vocab = 5;
  valid.elements = 12;
  valid.id_dtype = LOGITLESS_I64;
  valid.hidden = valid.weight = values.data();
  valid.ids = ids.data();
  valid.logits = values.data();
  const BadCandidates runs[] = {
      {"stage: expected 0 to 1, got 2", [](C& c) { c.stage = 2; }},
      {"rows: expected at least 0, got -1", [](C& c) { c.rows = -1; }},
      {"hidden_size: expected at least 1, got 0", [](C& c) { c.hidden_size = 0; }},
      {"vocab: expected at least 1, got 0", [](C& c) { c.vocab = 0; }},
      {"elements: expected a multiple of rows = 3 without offsets, got 13", [](C& c) { c.elements = 13; }},
      {"elements: expected 0 without rows, got 12", [](C& c) { c.rows = 0; }},
      {"temperature: expected a finite number > 0, got 0", [](C& c) { c.temperature = 0; }},
      {"temperature: expected 1 beside temperatures of rows, which take its place, got 2",
       [&](C& c) {
         c.temperature = 2;
         c.row_temperature = values.data();
       }},
      {"softcap: expected a finite number >= 0, got -1", [](C& c) { c.softcap = -1; }},
      {"hidden_stride: expected 0 or at least hidden_size, got 5", [](C& c) { c.hidden_stride = 5; }},
      {"weight_dtype: expected float32, bfloat16 or float16 (hidden is not float64), got float64",
       [](C& c) { c.weight_dtype = LOGITLESS_F64; }},
      {"id_dtype: expected int32 or int64, got float32", [](C& c) { c.id_dtype = LOGITLESS_F32; }},
      {"compute_dtype: expected bfloat16, float16, or float32 (operands as they are), got float64",
       [](C& c) { c.compute_dtype = LOGITLESS_F64; }},
      {"ids: expected a pointer, got null", [](C& c) { c.ids = nullptr; }},
      {"logits: expected a pointer, got null", [](C& c) { c.logits = nullptr; }},
      {"grad: expected a pointer, got null", [](C& c) { c.stage = LOGITLESS_CANDIDATES_GRADIENT; }},
      {"offsets[3]: expected elements = 12, got 11",
       [&](C& c) {
         offsets[3] = 11;
         c.offsets = offsets.data();
       }},
      {"accumulate_d_weight: expected 0 or 1, got 2", [](C& c) {
         c.stage = LOGITLESS_CANDIDATES_GRADIENT;
         c.accumulate_d_weight = 2;
       }}};
  logitless_context* context = nullptr;
  ASSERT_EQ(logitless_context_create(nullptr, &context), LOGITLESS_OK);
  for (const BadCandidates& run : runs) {
    C c = valid;
    run.spoil(c);
    EXPECT_EQ(logitless_candidates_run(context, &c, workspace, sizeof workspace, nullptr),
              LOGITLESS_INVALID_ARGUMENT)
        << run.message;
    EXPECT_STREQ(logitless_last_error(), run.message);
  }
  EXPECT_EQ(logitless_candidates_run(context, &valid, nullptr, 0, nullptr), LOGITLESS_OK);
  C gradient = valid;
  gradient.stage = LOGITLESS_CANDIDATES_GRADIENT;
  gradient.grad = gradient.d_weight = values.data();
  EXPECT_EQ(logitless_candidates_run(context, &gradient, nullptr, 0, nullptr), LOGITLESS_INVALID_ARGUMENT);
  EXPECT_TRUE(std::string(logitless_last_error()).starts_with("workspace_bytes: expected at least"));
  logitless_context_destroy(context);
}

}  // namespace
