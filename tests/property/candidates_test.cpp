// logitless_candidates_run on every engine beside float64: lists of any shape, formats and layouts of the
// operands, numbers that are hard for products, and lists that are wrong.
#include "candidates_fixture.h"
#include "engine_test.h"

namespace logitless_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class Candidates : public testing::TestWithParam<Engine> {
 protected:
  CandidateOutputs run(const CandidateCase& c) const { return CandidateRun(c).on(GetParam()); }
  void check(const CandidateCase& c) const {
    SCOPED_TRACE(std::to_string(c.rows) + " rows, " + std::to_string(c.elements()) + " elements, " +
                 std::to_string(c.vocab) + " x " + std::to_string(c.hidden_size));
    expect_near_truth(c, run(c));
  }
};

TEST_P(Candidates, AnyShape) {
  const int64_t shapes[][4] = {{1, 1, 1, 1},     {5, 1, 3, 7},    {2, 3, 5, 8},     {3, 64, 200, 64},
                               {4, 33, 40, 129}, {1, 300, 7, 24}, {2, 40, 9, 1040}, {40, 2, 30, 16}};
  for (const auto& s : shapes) check(even_lists(1, s[0], s[1], s[2], s[3]));
}

// So many columns and elements that a device takes its narrowest slices.
TEST_P(Candidates, ALargeVocabularySlow) {
  if (!GetParam().is_device()) GTEST_SKIP() << "no slices";
  check(even_lists(26, 600, 300, 90000, 72));
}

TEST_P(Candidates, UnevenListsWithEmptyRows) {
  for (const uint64_t seed : {2, 3, 4}) {
    check(uneven_lists(seed, 17, 90, 60, 72));
    CandidateCase few = uneven_lists(seed, 70, 3, 500, 21);
    few.id_dtype = LOGITLESS_I32;
    check(few);
  }
}

TEST_P(Candidates, NothingAtAll) {
  check(even_lists(5, 0, 0, 6, 10));
  check(even_lists(5, 4, 0, 6, 10));
  CandidateCase empty = uneven_lists(6, 3, 0, 9, 16);
  check(empty);
  empty.old_d_weight = empty.weight;
  check(empty);
  CandidateCase ignored = even_lists(7, 4, 5, 6, 10);
  ignored.ignore_id = 7;
  ignored.ids.assign(ignored.ids.size(), 7);
  check(ignored);
}

TEST_P(Candidates, AllFormats) {
  for (const logitless_dtype hidden : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}) {
    for (const logitless_dtype weight : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}) {
      CandidateCase c = uneven_lists(8, 9, 50, 40, 136);
      c.hidden_dtype = c.d_weight_dtype = hidden;
      c.weight_dtype = c.d_hidden_dtype = weight;
      c.bias_dtype = c.d_bias_dtype = hidden;
      fill_tensors(&c, 9);
      check(c);
      c.compute_dtype = LOGITLESS_BF16;
      check(c);
      Random random(10);
      c.old_d_weight = normal_values(random, c.vocab * c.hidden_size, 1, c.d_weight_dtype);
      check(c);
    }
  }
}

TEST_P(Candidates, EveryTransform) {
  for (const int transforms : {1, 2, 4, 7, 15}) {
    CandidateCase c = even_lists(10, 6, 20, 30, 48);
    c.bias.clear();
    if ((transforms & 1) != 0) c.scale = -1.7;
    if ((transforms & 2) != 0) c.temperature = 0.6;
    if ((transforms & 2) != 0) fill_tensors(&c, 11);
    if ((transforms & 4) != 0) c.softcap = 2.5;
    if ((transforms & 8) != 0) {
      c.temperature = 1;
      c.temperatures = {1, 0.5, 2, 0x1p-20, 3, 0x1p20};
    }
    check(c);
  }
  CandidateCase flat = even_lists(12, 3, 20, 30, 48);
  flat.scale = 0;
  check(flat);
  flat.hidden[0] = flat.weight[0] = kInfinity;
  EXPECT_TRUE(all_finite(run(flat).d_weight) && all_finite(run(flat).d_hidden));
}

// Rows that begin anywhere have the same bits as those that begin where loads are wide.
TEST_P(Candidates, RowsBeginAnywhere) {
  for (const logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}) {
    for (const int64_t hidden_size : {136, 1048}) {
      CandidateCase c = even_lists(13, 5, 40, 30, hidden_size, dtype);
      check(c);
      const CandidateOutputs expected = run(c);
      for (const int64_t skew : {1, 2, 3, 5}) {
        c.hidden_layout = {skew, skew};
        c.weight_layout = {7 - skew, skew};
        c.d_hidden_layout = {skew - 1, 4 - skew + 1};
        c.d_weight_layout = {skew, 8 - skew};
        EXPECT_EQ(difference(run(c), expected), "") << skew;
      }
    }
  }
}

TEST_P(Candidates, SameBitsEveryTime) {
  CandidateCase c = uneven_lists(14, 60, 80, 25, 96);
  const CandidateOutputs first = run(c);
  for (int again = 0; again < 3; ++again) EXPECT_EQ(difference(run(c), first), "");
  if (GetParam().is_device()) return;
  for (const int threads : {1, 3}) {
    EXPECT_EQ(difference(CandidateRun(c).on(GetParam(), threads), first), "") << threads;
  }
}

// Many elements of few columns: their lists are long.
TEST_P(Candidates, LongListsOfColumns) {
  CandidateCase c = even_lists(15, 90, 30, 3, 40);
  check(c);
  c.ids.assign(c.ids.size(), 1);
  check(c);
  const CandidateOutputs first = run(c);
  EXPECT_EQ(difference(run(c), first), "");
}

// Lists that are a large part of the vocabulary: a device multiplies the whole weight. Some lists are empty
// or repeat ids.
TEST_P(Candidates, LargePartsOfTheVocabulary) {
  for (const logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F64}) {
    if (dtype == LOGITLESS_F64 && !GetParam().has_float64()) continue;
    const bool rounds_u = GetParam().is_device() && dtype == LOGITLESS_BF16;
    for (const int64_t vocab : {40, 331}) {
      CandidateCase c = uneven_lists(27, 150, 2 * vocab, vocab, 48, dtype);
      c.softcap = 3;
      c.temperature = 0.5;
      expect_near_truth(c, run(c), rounds_u);
      if (dtype == LOGITLESS_BF16) c.d_weight_dtype = LOGITLESS_F32;
      Random random(28);
      c.old_d_weight = normal_values(random, c.vocab * c.hidden_size, 1, c.d_weight_dtype);
      const CandidateOutputs all = run(c);
      expect_near_truth(c, all, rounds_u);
      EXPECT_EQ(difference(run(c), all), "");
      c.wants_d_hidden = false;
      EXPECT_TRUE(same_bits(run(c).d_weight, all.d_weight));
      c.wants_d_hidden = true;
      c.wants_d_weight = false;
      EXPECT_TRUE(same_bits(run(c).d_hidden, all.d_hidden));
    }
  }
}

// Each budget from the least on is kept, and a smaller one is refused.
TEST_P(Candidates, Budgets) {
  for (const logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16}) {
    std::vector<CandidateCase> cases = {uneven_lists(31, 20, 60, 90, 72, dtype)};
    if (GetParam().is_device()) {  // where a budget decides how lists are computed
      cases.push_back(uneven_lists(32, 130, 300, 331, 24, dtype));
      cases.push_back(even_lists(33, 130, 300, 33000, 8, dtype));
    }
    for (CandidateCase& c : cases) {
      const logitless::Context context = make_context(GetParam());
      const auto needed = [&](size_t budget) {
        c.max_workspace_bytes = budget;
        return CandidateRun(c).workspace_bytes(context, GetParam().is_device());
      };
      const auto refused = [&](size_t budget) -> size_t {
        try {
          needed(budget);
          return 0;
        } catch (const logitless::Error& error) {
          EXPECT_EQ(error.status(), LOGITLESS_BUDGET_TOO_SMALL) << error.what();
          EXPECT_EQ(error.argument, "max_workspace_bytes");
          return error.required_bytes;
        }
      };
      const size_t most = needed(0);
      size_t least = 1;
      for (int stages = 0; stages < 2; ++stages) least = std::max(least, refused(least));
      ASSERT_LE(least, most);
      if (least > 1) {
        EXPECT_EQ(refused(least - 1), least);
      }
      for (const size_t budget : {least, least + (most - least) / 2, most}) {
        EXPECT_LE(needed(budget), budget);
        expect_near_truth(c, run(c), GetParam().is_device() && dtype == LOGITLESS_BF16);
      }
    }
  }
}

// Many equal ids in each list, beside each other and apart, with empty lists and ignored elements.
TEST_P(Candidates, EqualIdsInLargePartsOfTheVocabulary) {
  for (const logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16}) {
    CandidateCase c = uneven_lists(30, 140, 160, 70, 24, dtype);
    for (size_t e = 0; e < c.ids.size(); ++e) {
      if (e % 5 < 3) c.ids[e] = e % 2 == 0 ? 3 : 69;
      if (e % 11 == 0) c.ids[e] = -1;
    }
    expect_near_truth(c, run(c), GetParam().is_device() && dtype == LOGITLESS_BF16);
    c.ids.assign(c.ids.size(), 69);
    const CandidateOutputs first = run(c);
    expect_near_truth(c, first, GetParam().is_device() && dtype == LOGITLESS_BF16);
    EXPECT_EQ(difference(run(c), first), "");
  }
}

// So many columns that a device takes more than one window of them.
TEST_P(Candidates, SeveralWindowsOfColumns) {
  CandidateCase c = even_lists(29, 130, 300, 33000, 8, LOGITLESS_BF16);
  expect_near_truth(c, run(c), GetParam().is_device());
}

// Equal lengths and offsets are the same lists.
TEST_P(Candidates, OffsetsOfEqualLengths) {
  CandidateCase c = even_lists(16, 7, 9, 20, 33);
  const CandidateOutputs expected = run(c);
  for (int64_t row = 0; row <= c.rows; ++row) c.offsets.push_back(static_cast<double>(9 * row));
  EXPECT_EQ(difference(run(c), expected), "");
}

TEST_P(Candidates, ALogitDoesNotDependOnItsPlace) {
  CandidateCase c = even_lists(17, 3, 70, 20, 264);
  const CandidateOutputs got = run(c);
  for (size_t i = 0; i < c.ids.size(); ++i) {
    for (size_t k = i / 70 * 70; k < i; ++k) {
      if (c.ids[k] == c.ids[i]) {
        EXPECT_EQ(got.logits[k], got.logits[i]);
      }
    }
  }
}

TEST_P(Candidates, OnlySomeGradients) {
  CandidateCase c = even_lists(18, 5, 30, 40, 64);
  const CandidateOutputs all = run(c);
  c.wants_d_weight = false;
  EXPECT_TRUE(same_bits(run(c).d_hidden, all.d_hidden));
  c.wants_d_weight = true;
  c.wants_d_hidden = false;
  EXPECT_TRUE(same_bits(run(c).d_weight, all.d_weight));
  c.bias.clear();
  EXPECT_TRUE(same_bits(run(c).d_weight, all.d_weight));
}

TEST_P(Candidates, HugeLogits) {
  CandidateCase c = even_lists(19, 4, 30, 20, 64);
  c.scale = 1e4;
  check(c);
  c.softcap = 3;
  check(c);
}

// An infinity or NaN reaches the elements that read it and no others, and those with gradient 0 read nothing.
TEST_P(Candidates, ANaNOrAnInfinityStaysWhereItIs) {
  for (const double bad : {kNan, kInfinity}) {
    CandidateCase c = even_lists(20, 4, 12, 10, 40);
    for (size_t e = 0; e < c.ids.size(); ++e) {
      if (c.ids[e] == 3 || e / 12 == 1) c.grad[e] = 0;
    }
    const CandidateOutputs expected = run(c);
    for (int64_t d = 0; d < c.hidden_size; ++d) {
      c.weight[static_cast<size_t>(3 * c.hidden_size + d)] = bad;
      c.hidden[static_cast<size_t>(c.hidden_size + d)] = bad;
    }
    CandidateOutputs got = run(c);
    for (size_t e = 0; e < c.ids.size(); ++e) {
      if (c.ids[e] == 3 || e / 12 == 1) {
        EXPECT_FALSE(std::isfinite(got.logits[e])) << e;
      } else {
        EXPECT_EQ(got.logits[e], expected.logits[e]) << e;
      }
    }
    got.logits = expected.logits;
    EXPECT_EQ(difference(got, expected), "");
  }
}

TEST_P(Candidates, TemperaturesOutOfRange) {
  CandidateCase c = even_lists(21, 4, 6, 10, 16);
  c.temperatures = {0, -1, kNan, 1};
  const CandidateOutputs got = run(c);
  for (size_t e = 0; e < c.ids.size(); ++e) EXPECT_EQ(std::isnan(got.logits[e]), e < 18) << e;
}

TEST_P(Candidates, WrongIds) {
  for (const logitless_dtype dtype : {LOGITLESS_I32, LOGITLESS_I64}) {
    CandidateCase c = even_lists(22, 4, 10, 10, 16);
    c.id_dtype = dtype;
    for (size_t e = 0; e < c.ids.size(); ++e) {
      if (e % 10 > 4) c.ids[e] = -1;
    }
    const CandidateOutputs expected = run(c);
    const double bad[] = {10, -2, 2147483647, -2147483648.0};
    for (size_t k = 0; k < 4; ++k) c.ids[5 + 10 * k] = bad[k];
    if (!GetParam().is_device()) {
      const logitless::Error error = refusal([&] { run(c); });
      EXPECT_EQ(error.status(), LOGITLESS_INVALID_TARGET);
      EXPECT_STREQ(error.what(), "ids: expected 0 <= id < 10 or ignore_id -1, got 10 at ids[5]");
      continue;
    }
    CandidateOutputs got = run(c);
    EXPECT_EQ(got.invalid, (Values{4, 5}));
    for (size_t k = 0; k < 4; ++k) {
      EXPECT_TRUE(std::isnan(got.logits[5 + 10 * k]));
      got.logits[5 + 10 * k] = expected.logits[5 + 10 * k];
    }
    EXPECT_EQ(difference(got, expected), "");
  }
}

TEST_P(Candidates, WrongOffsets) {
  const Values wrong[] = {{0, 3, 2, 9},  {1, 3, 5, 9},    {0, 3, 5, 8},
                          {0, -4, 5, 9}, {0, 1e15, 5, 9}, {0, 3, 5, 1e15}};
  for (const Values& offsets : wrong) {
    CandidateCase c = even_lists(23, 3, 3, 10, 16);
    c.offsets = offsets;
    if (!GetParam().is_device()) {
      EXPECT_EQ(refusal([&] { run(c); }).status(), LOGITLESS_INVALID_ARGUMENT);
      continue;
    }
    const CandidateOutputs got = run(c);
    EXPECT_EQ(got.invalid, (Values{9, 0}));
    EXPECT_TRUE(all_are(kNan, got.logits));
    EXPECT_TRUE(all_are(0, got.d_hidden) && all_are(0, got.d_weight) && all_are(0, got.d_bias));
  }
}

TEST_P(Candidates, InFloat64) {
  if (!GetParam().has_float64()) GTEST_SKIP() << "no float64";
  CandidateCase c = uneven_lists(24, 9, 50, 40, 75, LOGITLESS_F64);
  c.scale = 0.3;
  c.softcap = 1.5;
  check(c);
  check(even_lists(25, 30, 20, 3, 64, LOGITLESS_F64));
}

LOGITLESS_TEST_ON(Candidates, engines());

}  // namespace
}  // namespace logitless_test
