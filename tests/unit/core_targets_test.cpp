#include "core/targets.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/status.h"
#include "core/validate.h"

namespace logitless {
namespace {

Problem problem_of(int64_t tokens) {
  Problem p;
  p.tokens = tokens;
  p.vocab = 50;
  p.hidden = 1;
  return validated(p);
}

std::vector<int64_t> targets_of(const Problem& p, const std::vector<int64_t>& targets) {
  std::vector<int64_t> out;
  for (int64_t row = 0; row < p.tokens; ++row) out.push_back(target_of_row(p, targets.data(), row));
  return out;
}

TEST(Targets, AreReadAsTheyAreWithoutAShift) {
  EXPECT_EQ(targets_of(problem_of(3), {4, -100, 6}), (std::vector<int64_t>{4, -100, 6}));
}

TEST(Targets, ShiftEndsWithEachSequence) {
  Problem p = problem_of(6);
  p.shift = 1;
  EXPECT_EQ(targets_of(p, {0, 1, 2, 3, 4, 5}), (std::vector<int64_t>{1, 2, 3, 4, 5, -100}));
  p.sequence_length = 3;
  EXPECT_EQ(targets_of(p, {0, 1, 2, 3, 4, 5}), (std::vector<int64_t>{1, 2, -100, 4, 5, -100}));
  p.shift = 2;
  EXPECT_EQ(targets_of(p, {0, 1, 2, 3, 4, 5}), (std::vector<int64_t>{2, -100, -100, 5, -100, -100}));
  for (int64_t shift : {int64_t{3}, int64_t{4}, int64_t{1} << 40}) {
    p.shift = shift;
    EXPECT_EQ(targets_of(p, {0, 1, 2, 3, 4, 5}), std::vector<int64_t>(6, -100));
  }
}

TEST(Targets, RowsAreCompactedInOrder) {
  const Problem p = problem_of(5);
  const std::vector<int64_t> targets = {-100, 3, -100, 4, 5};
  std::vector<int64_t> rows(5, -7);
  EXPECT_EQ(compact_rows(p, targets.data(), rows.data()), 3);
  EXPECT_EQ(rows, (std::vector<int64_t>{1, 3, 4, -7, -7}));
}

TEST(Targets, OutOfRangeIsRefusedWithPlaceAndValue) {
  const Problem p = problem_of(3);
  for (int64_t bad : {int64_t{50}, int64_t{-1}, int64_t{1} << 62, -(int64_t{1} << 62)}) {
    const std::vector<int64_t> targets = {1, bad, 2};
    try {
      check_targets(p, targets.data());
      FAIL() << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kInvalidTarget);
      EXPECT_EQ(std::string(error.what()), "targets: expected 0 <= target < 50 or ignore_index -100, got " +
                                               std::to_string(bad) + " at targets[1]");
    }
  }
}

// The place is the target's own, not that of the row that predicts it.
TEST(Targets, OutOfRangeAfterAShift) {
  Problem p = problem_of(6);
  p.sequence_length = 3;
  p.shift = 1;
  const std::vector<int64_t> targets = {1, 2, 3, 1, 2, 77};
  try {
    check_targets(p, targets.data());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "targets: expected 0 <= target < 50 or ignore_index -100, got 77 at targets[5]");
  }
}

// A target that no row predicts is never looked at.
TEST(Targets, UnusedOnesMayBeAnything) {
  Problem p = problem_of(3);
  p.shift = 1;
  const std::vector<int64_t> targets = {1'000'000, 1, 2};
  EXPECT_NO_THROW(check_targets(p, targets.data()));
}

TEST(Targets, DivisorsOfTheMean) {
  Problem p = problem_of(3);
  const std::vector<int64_t> targets = {2, -100, 1};
  const std::vector<float> class_weight = {10, 20, 40};
  const std::vector<float> token_weight = {3, 5, 7};
  p.vocab = p.vocab_total = 3;
  Buffers b;
  b.targets = targets.data();
  b.class_weight = class_weight.data();
  b.token_weight = token_weight.data();
  const std::vector<int64_t> rows = {0, 2};
  const auto divisor = [&] { return reduction_divisor(p, b, rows.data(), 2); };
  EXPECT_EQ(divisor(), 2);
  p.has.class_weight = true;
  EXPECT_EQ(divisor(), 40 + 20);
  p.has.token_weight = true;
  EXPECT_EQ(divisor(), 3 * 40 + 7 * 20);
  p.has.class_weight = false;
  EXPECT_EQ(divisor(), 3 + 7);
  p.num_items = 8;
  EXPECT_EQ(divisor(), 8);
  p.reduction = Reduction::kSum;
  EXPECT_EQ(divisor(), 1);
  p.reduction = Reduction::kNone;
  EXPECT_EQ(divisor(), 1);
}

TEST(Targets, OfSeveralARowTheFirstThatIsOneCounts) {
  Problem p = problem_of(4);
  p.targets_per_row = 3;
  p.shift = 1;
  const std::vector<int64_t> targets = {9, 9, 9, -100, 4, 5, -100, -100, -100, 7, 7, -100};
  EXPECT_EQ(targets_of(p, targets), (std::vector<int64_t>{4, -100, 7, -100}));
  EXPECT_EQ(target_of_row(p, targets.data(), 0, 2), 5);
  EXPECT_EQ(target_of_row(p, targets.data(), 3, 0), -100);
  std::vector<float> weight = {0, 0, 0, 9, 2, 3, 9, 9, 9, 0.25f, 0.5f, 9};
  Buffers b;
  b.targets = targets.data();
  EXPECT_EQ(weight_as_target(p, b, 2, 7), 2);
  b.target_weight = weight.data();
  EXPECT_EQ(target_weight_of_row(p, b, 0, 0), 0);  // ignore_index
  EXPECT_EQ(target_weight_of_row(p, b, 0, 1), 2);
  EXPECT_EQ(weight_as_target(p, b, 2, 7), 0.75);
  EXPECT_EQ(weight_as_target(p, b, 2, 8), 0);
}

TEST(Targets, OfSeveralOutOfRangeAreRefusedWithRowAndColumn) {
  Problem p = problem_of(2);
  p.targets_per_row = 2;
  const std::vector<int64_t> targets = {1, 2, -100, 50};
  try {
    check_targets(p, targets.data());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kInvalidTarget);
    EXPECT_EQ(std::string(error.what()),
              "targets: expected 0 <= target < 50 or ignore_index -100, got 50 at targets[1, 1]");
  }
}

}  // namespace
}  // namespace logitless
