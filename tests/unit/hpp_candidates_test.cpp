// The C++ form of lists of ids: what it fills in, and what it refuses. tests/property tests numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include <logitless/candidates.hpp>

namespace {

// Two rows, five columns, three hidden numbers.
class Candidates : public testing::Test {
 protected:
  template <class Call>
  static std::string refusal(const Call& call) {
    try {
      call();
    } catch (const logitless::Error& error) {
      return error.what();
    }
    return "";
  }

  std::vector<float> hidden_ = {1, 2, 3, -1, 0, 2};
  std::vector<float> weight_ = {1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 2, 0, -1};
  std::vector<int64_t> ids_ = {3, 0, 4, 1};
  const logitless::Matrix<const float> hidden{hidden_.data(), 2, 3};
  const logitless::Matrix<const float> weight{weight_.data(), 5, 3};
  const std::span<const int64_t> ids{ids_};
  const logitless::Context context_;
};

TEST_F(Candidates, BothStages) {
  std::vector<float> logits(4), grad = {1, 0, 2, -1}, d_hidden(6), d_weight(15);
  logitless::Candidates c = logitless::make_candidates(hidden, weight, ids);
  c.logits = logits.data();
  logitless::run_once(context_, c);
  EXPECT_EQ(logits, (std::vector<float>{6, 1, -4, 0}));
  c.stage = LOGITLESS_CANDIDATES_GRADIENT;
  c.grad = grad.data();
  c.d_hidden = d_hidden.data();
  c.d_weight = d_weight.data();
  logitless::run_once(context_, c);
  EXPECT_EQ(d_hidden, (std::vector<float>{1, 1, 1, 4, -1, -2}));
  EXPECT_EQ(d_weight, (std::vector<float>{0, 0, 0, 1, 0, -2, 0, 0, 0, 1, 2, 3, -2, 0, 4}));
}

TEST_F(Candidates, ListsOfSeveralLengths) {
  const std::vector<int64_t> offsets = {0, 1, 4};
  std::vector<float> logits(4);
  logitless::Candidates c = logitless::make_candidates(hidden, weight, ids, std::span(offsets));
  c.logits = logits.data();
  logitless::Workspace workspace(logitless::workspace_bytes(context_, c));
  logitless::run_candidates(context_, c, workspace.bytes());
  EXPECT_EQ(logits, (std::vector<float>{6, -1, -4, 0}));
}

TEST_F(Candidates, DtypesFollowTheOperands) {
  const logitless::Matrix<const logitless::bf16> half{nullptr, 5, 3, 8};
  const std::vector<int32_t> narrow(4);
  const auto c = logitless::make_candidates(hidden, half, std::span<const int32_t>(narrow));
  EXPECT_EQ(c.hidden_dtype, LOGITLESS_F32);
  EXPECT_EQ(c.d_hidden_dtype, LOGITLESS_F32);
  EXPECT_EQ(c.weight_dtype, LOGITLESS_BF16);
  EXPECT_EQ(c.d_weight_dtype, LOGITLESS_BF16);
  EXPECT_EQ(c.bias_dtype, LOGITLESS_BF16);
  EXPECT_EQ(c.id_dtype, LOGITLESS_I32);
  EXPECT_EQ(c.weight_stride, 8);
  EXPECT_EQ(c.temperature, 1);
  EXPECT_EQ(c.ignore_id, -1);
}

TEST_F(Candidates, WrongArgumentsAreNamed) {
  const logitless::Matrix<const float> narrow{weight_.data(), 5, 2};
  EXPECT_EQ(refusal([&] { logitless::make_candidates(hidden, narrow, ids); }),
            "weight: expected 3 columns as hidden has, got 2");
  EXPECT_EQ(refusal([&] { logitless::make_candidates(hidden, weight, ids, std::span<const int64_t>(ids_)); }),
            "offsets: expected 3 entries, one more than hidden has rows, got 4");
  const auto without_output = logitless::make_candidates(hidden, weight, ids);
  EXPECT_EQ(refusal([&] { logitless::run_once(context_, without_output); }),
            "logits: expected a pointer, got null");
  ids_[1] = 5;
  auto c = logitless::make_candidates(hidden, weight, ids);
  std::vector<float> logits(4);
  c.logits = logits.data();
  EXPECT_EQ(refusal([&] { logitless::run_once(context_, c); }),
            "ids: expected 0 <= id < 5 or ignore_id -1, got 5 at ids[1]");
}

}  // namespace
