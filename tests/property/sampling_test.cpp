// Samples of the softmax, compared with keys from logits in float64 and noise computed here.
#include <gtest/gtest.h>
#include <logitless/sampling.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "device_memory.h"
#include "engine_test.h"

namespace logitless_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

uint64_t mixed64(uint64_t h) {
  h ^= h >> 30;
  h *= 0xbf58476d1ce4e5b9ull;
  h ^= h >> 27;
  h *= 0x94d049bb133111ebull;
  return h ^ (h >> 31);
}
uint32_t mixed32(uint32_t h) {
  h ^= h >> 16;
  h *= 0x7feb352du;
  h ^= h >> 15;
  h *= 0x846ca68bu;
  return h ^ (h >> 16);
}

// 64 random bits of a counter, as a number in (0, 1).
struct Share {
  uint32_t high;
  long double v;

  Share(uint32_t first, uint32_t second, uint32_t counter) {
    high = counter * 0x9e3779b1u + first;
    high = (high ^ (high >> 16)) * 0x7feb352du + second;
    high = (high ^ (high >> 15)) * 0x846ca68bu;
    v = (static_cast<long double>(high) * 0x1p32L + mixed32(high + first) + 0.5L) * 0x1p-64L;
  }
};

// -log of an exponential number, from the definition in docs/sampling.md.
double noise_of(int64_t seed, int64_t row, int64_t sample, int64_t column) {
  constexpr uint64_t kStep = 0x9e3779b97f4a7c15ull;
  uint64_t key = mixed64(static_cast<uint64_t>(seed) + kStep);
  key = mixed64(key + static_cast<uint64_t>(row) + kStep);
  key = mixed64(key + static_cast<uint64_t>(sample) + kStep);
  const auto low = static_cast<uint32_t>(key & 0xffffffffu), high = static_cast<uint32_t>(key >> 32),
             id = static_cast<uint32_t>(column);
  const Share group(high, low, id / 64 * 4 + id / 2 % 4), own(low, high, id);
  long double number = -std::log1p(-group.v) / 16;
  if (mixed32(group.high + low) >> 28 != id / 8 % 8 * 2 + id % 2) number -= std::log1p(-own.v);
  return static_cast<double>(-std::log(number));
}

class Sampling : public EngineTest {
 protected:
  Case sampling(uint64_t seed, PlainSize size, int64_t count) const {
    Case c = plain(seed, size);
    c.mode = Mode::kForward;
    c.problem.num_samples = count;
    c.problem.seed = 1234 + static_cast<int64_t>(seed);
    return c;
  }
  Case of_bias(const std::vector<double>& logits, int64_t tokens, int64_t count) const {
    Case c = sampling(1, {tokens, static_cast<int64_t>(logits.size()), 8}, count);
    c.problem.has.bias = 1;
    c.problem.dtype.bias = LOGITLESS_F32;
    c.bias = logits;
    std::fill(c.hidden.begin(), c.hidden.end(), 0.0);
    return c;
  }
  // Whether the engine samples from the operands.
  bool can_sample(const Case& c) const { return !is_device() || c.problem.dtype.hidden != LOGITLESS_F64; }

  static double noise(const Case& c, size_t row, int64_t sample, int64_t column) {
    if (c.sample_seed.empty()) return noise_of(c.problem.seed, static_cast<int64_t>(row), sample, column);
    return noise_of(c.sample_seed[row], 0, sample, column);
  }

  // Keys are within the errors of logits, and of a rounding of the noise and of themselves. So is the
  // winner's.
  void check(const Case& c, const Outputs& got) const {
    const Expected expected(c);
    const Bounds bounds = expected.bounds_of(engine());
    const Answer& truth = expected.truth();
    const auto count = static_cast<size_t>(c.problem.num_samples),
               vocab = static_cast<size_t>(c.problem.vocab);
    ASSERT_EQ(got.sampled_ids.size(), static_cast<size_t>(c.problem.tokens) * count);
    for (size_t i = 0; i < got.sampled_ids.size(); ++i) {
      const size_t row = i / count;
      const std::string place = "row " + std::to_string(row) + ", sample " + std::to_string(i % count);
      if (c.target_of(static_cast<int64_t>(row)) == c.problem.ignore_index) {
        EXPECT_EQ(got.sampled_ids[i], -1) << place;
        EXPECT_EQ(got.sampled_keys[i], -kInfinity) << place;
        EXPECT_EQ(got.sampled_logits[i], 0) << place;
        EXPECT_EQ(got.sampled_log_probs[i], 0) << place;
        continue;
      }
      const double* logits = truth.logits.data() + row * vocab;
      double best = -kInfinity;
      for (size_t j = 0; j < vocab; ++j) {
        best = std::max(best,
                        logits[j] + noise(c, row, static_cast<int64_t>(i % count), static_cast<int64_t>(j)));
      }
      const auto id = static_cast<int64_t>(got.sampled_ids[i]);
      ASSERT_TRUE(id >= 0 && id < c.problem.vocab) << place << " " << id;
      const double key = logits[id] + noise(c, row, static_cast<int64_t>(i % count), id);
      const double rounding = (std::fabs(key) + 2 * std::fabs(logits[id]) + 45) * 0x1p-23;
      EXPECT_GE(key, best - 2 * (bounds.logit + rounding)) << place;
      EXPECT_NEAR(got.sampled_keys[i], key, bounds.logit + rounding) << place;
      EXPECT_NEAR(got.sampled_logits[i], logits[id], bounds.logit + rounding) << place;
      EXPECT_NEAR(got.sampled_log_probs[i], logits[id] - truth.lse[row], bounds.logit + bounds.lse + rounding)
          << place;
    }
  }
  void expect_samples(const Case& c, size_t budget = 0) const {
    SCOPED_TRACE(describe(c));
    const Outputs got = solve(c, budget);
    check(c, got);
    Expected(c).check(engine(), got);
  }
  void expect_shards(const Case& c) const {
    const Outputs whole = solve(c);
    Outputs merged;
    int64_t start = 0;
    for (const int64_t size : {200, 1, 500}) {
      logitless::Problem shard = pass_problem(c, logitless::Pass::forward);
      shard.vocab_start = start, shard.vocab = size, shard.vocab_total = 701;
      start += size;
      const Outputs one = run_pass(context_, shard, c);
      if (merged.sampled_keys.empty()) {
        merged = one;
        continue;
      }
      for (size_t i = 0; i < one.sampled_keys.size(); ++i) {
        if (one.sampled_keys[i] <= merged.sampled_keys[i]) continue;
        merged.sampled_keys[i] = one.sampled_keys[i];
        merged.sampled_ids[i] = one.sampled_ids[i];
      }
    }
    EXPECT_EQ(merged.sampled_ids, whole.sampled_ids);
    EXPECT_EQ(merged.sampled_keys, whole.sampled_keys);
  }
};

// Ids, seeds and numbers of rows of one list, and the noise that an engine made.
struct NoiseOfLists {
  int64_t rows, columns;
  Tensor seed, row_numbers, ids, noise;
  bool has_seeds_of_rows = false, has_row_numbers = false;

  void make(const Engine& engine, int64_t sample) {
    const logitless::Context context = make_context(engine);
    const auto run = [&](auto place, void* stream) {
      logitless_sample_noise lists{};
      lists.rows = rows;
      lists.columns = columns;
      lists.sample = sample;
      lists.has_seeds_of_rows = has_seeds_of_rows;
      lists.seed = static_cast<const int64_t*>(place(seed));
      lists.row_numbers = has_row_numbers ? static_cast<const int64_t*>(place(row_numbers)) : nullptr;
      lists.ids = static_cast<const int64_t*>(place(ids));
      lists.noise = static_cast<float*>(place(noise));
      logitless::check(logitless_sample_noise_run(context.handle(), &lists, stream));
    };
    if (engine.is_device()) {
      run_on_device({seed.memory(), row_numbers.memory(), ids.memory(), noise.memory()}, 0,
                    [&](const OnDevice& device) {
                      run([&](Tensor& t) { return device.of(t.data()); }, device.stream);
                    });
    } else {
      run([](Tensor& t) { return t.data(); }, nullptr);
    }
    for (Tensor* each : {&seed, &row_numbers, &ids, &noise}) EXPECT_EQ(each->violation(), "");
  }
};

// The noise of lists is that of whole rows, up to a rounding to float32.
TEST_P(Sampling, NoiseOfListsIsThatOfRows) {
  constexpr int64_t kRows = 37, kColumns = 45;
  for (const bool has_seeds_of_rows : {false, true}) {
    for (const bool has_row_numbers : {false, true}) {
      NoiseOfLists lists{.rows = kRows,
                         .columns = kColumns,
                         .seed = Tensor(LOGITLESS_I64, has_seeds_of_rows ? kRows : 1, 1),
                         .row_numbers = Tensor(LOGITLESS_I64, kRows, 1),
                         .ids = Tensor(LOGITLESS_I64, kRows, kColumns),
                         .noise = Tensor(LOGITLESS_F32, kRows, kColumns)};
      lists.has_seeds_of_rows = has_seeds_of_rows;
      lists.has_row_numbers = has_row_numbers;
      std::vector<double> seeds, numbers, ids;
      for (int64_t row = 0; row < kRows; ++row) {
        if (row == 0 || has_seeds_of_rows) seeds.push_back(static_cast<double>((row - 5) * 1000003));
        numbers.push_back(static_cast<double>(row * row));
        for (int64_t k = 0; k < kColumns; ++k)
          ids.push_back(static_cast<double>(k * k * k * 20011 % 2147483648));
        ids.back() = 2147483647;
      }
      lists.seed.fill(seeds);
      lists.row_numbers.fill(numbers);
      lists.ids.fill(ids);
      lists.make(engine(), 3);
      const std::vector<double> got = lists.noise.values();
      for (size_t i = 0; i < got.size(); ++i) {
        const size_t row = i / kColumns;
        const double number = has_seeds_of_rows ? 0
                              : has_row_numbers ? numbers[row]
                                                : static_cast<double>(row);
        const double wanted = noise_of(static_cast<int64_t>(seeds[has_seeds_of_rows ? row : 0]),
                                       static_cast<int64_t>(number), 3, static_cast<int64_t>(ids[i]));
        ASSERT_NEAR(got[i], wanted, std::abs(wanted) * 0x1p-23) << i;
      }
    }
  }
}

TEST_P(Sampling, WinsTheRaceOfAllColumns) {
  const PlainSize sizes[] = {{1, 1, 1},       {3, 7, 5},      {17, 449, 24},
                             {130, 1031, 40}, {65, 4999, 16}, {257, 700, 64}};
  for (const PlainSize& size : sizes) {
    for (const int64_t count : {1, 3})
      expect_samples(sampling(static_cast<uint64_t>(size.vocab), size, count));
  }
  expect_samples(sampling(5, {4, 900, 16}, 64));
}

TEST_P(Sampling, RandomProblems) {
  const std::vector<Case> cases = random_cases(500, is_device() ? 12 : 40, {}, [&](Case* c) {
    c->mode = Mode::kForward;
    c->problem.top_k = 0;
    c->problem.batch_invariant = 0;
    c->problem.has.saved = 0;
    c->problem.gradient = LOGITLESS_EXACT;
    c->problem.num_samples = 2;
    c->problem.seed = static_cast<int64_t>(c->seed) << 33;
    return can_sample(*c);
  });
  for (const Case& c : cases) expect_samples(c);
}

// Every plan cuts rows and columns in another way.
TEST_P(Sampling, EveryBudgetGivesTheSameSamples) {
  Case c = sampling(3, {200, 1500, 24}, 2);
  const Outputs got = solve(c);
  for (const size_t bytes : plan_bytes(pass_problem(c, logitless::Pass::forward))) {
    const Outputs other = solve(c, bytes);
    EXPECT_EQ(other.sampled_ids, got.sampled_ids) << bytes;
  }
}

// Rows in any order with their own seeds; row 0 of a scalar seed has the samples of its own seed.
TEST_P(Sampling, RowsWithTheirOwnSeedsKeepTheirSamples) {
  Case c = sampling(4, {70, 600, 24}, 2);
  for (int64_t i = 0; i < 70; ++i) c.sample_seed.push_back(i * i - 600);
  expect_samples(c);
  const Outputs all = solve(c);
  const std::vector<size_t> order = shuffled_rows(70, 9);
  Case moved = rows_of(c, order);
  moved.sample_seed = rows_of(c.sample_seed, 70, order);
  const Outputs got = solve(moved);
  EXPECT_EQ(got.sampled_ids, rows_of(all.sampled_ids, 70, order));
  Case one = rows_of(c, {33});
  one.sample_seed.clear();
  one.problem.seed = c.sample_seed[33];
  EXPECT_EQ(solve(one).sampled_ids, rows_of(all.sampled_ids, 70, {33}));
  one.problem.seed = 0;
  one.seed_in_memory = {c.sample_seed[33]};
  EXPECT_EQ(solve(one).sampled_ids, rows_of(all.sampled_ids, 70, {33}));
}

TEST_P(Sampling, WithoutTargets) {
  Case c = sampling(6, {40, 300, 16}, 1);
  const Outputs with = solve(c);
  c.has_targets = false;
  const Outputs without = solve(c);
  EXPECT_EQ(without.sampled_ids, with.sampled_ids);
  EXPECT_EQ(without.lse, with.lse);
  c.problem.ignore_index = 0;
  EXPECT_EQ(refusal([&] { solve(c); }).argument, "targets");
}

TEST_P(Sampling, IgnoredRows) {
  Case c = sampling(9, {300, 500, 16}, 2);
  for (size_t row = 0; row < 300; ++row) {
    if (row < 140 || row % 3 == 0) c.targets[row] = c.problem.ignore_index;
  }
  expect_samples(c);
  std::fill(c.targets.begin(), c.targets.end(), c.problem.ignore_index);
  EXPECT_EQ(solve(c).sampled_ids, std::vector<double>(600, -1));
}

// The frequencies of samples are the probabilities: chi^2 within 5 standard deviations, which it exceeds with
// a probability below 1e-5.
TEST_P(Sampling, FrequenciesAreTheProbabilities) {
  std::vector<double> logits;
  for (int j = 0; j < 37; ++j) logits.push_back(0.25 * ((j * 7) % 37) - 4);
  const Case c = of_bias(logits, is_device() ? 100 : 2000, 64);
  const Outputs got = solve(c);
  double sum = 0;
  for (const double z : logits) sum += std::exp(z);
  std::vector<double> counts(37);
  for (const double id : got.sampled_ids) ++counts[static_cast<size_t>(id)];
  double chi_square = 0, cells = 0, rest = 0, rest_expected = 0;
  for (size_t j = 0; j < 37; ++j) {
    const double expected = static_cast<double>(got.sampled_ids.size()) * std::exp(logits[j]) / sum;
    if (expected < 10) {
      rest += counts[j], rest_expected += expected;
      continue;
    }
    chi_square += (counts[j] - expected) * (counts[j] - expected) / expected;
    ++cells;
  }
  if (rest_expected > 0)
    chi_square += (rest - rest_expected) * (rest - rest_expected) / rest_expected, ++cells;
  EXPECT_NEAR(chi_square, cells - 1, 5 * std::sqrt(2 * (cells - 1)));
  for (size_t i = 0; i < got.sampled_ids.size(); ++i) {
    const double z = logits[static_cast<size_t>(got.sampled_ids[i])];
    ASSERT_NEAR(got.sampled_log_probs[i], z - std::log(sum), 4e-6);
  }
}

TEST_P(Sampling, NaNAndInfiniteLogits) {
  std::vector<double> logits(1000, 1.0);
  logits[700] = logits[40] = kInfinity;
  Outputs got = solve(of_bias(logits, 3, 2));
  EXPECT_TRUE(all_are(40, got.sampled_ids));
  EXPECT_TRUE(all_are(kNaN, got.sampled_log_probs));
  logits[900] = logits[800] = kNaN;
  got = solve(of_bias(logits, 3, 2));
  EXPECT_TRUE(all_are(800, got.sampled_ids));
  EXPECT_TRUE(all_are(kNaN, got.sampled_log_probs));
  got = solve(of_bias(std::vector<double>(1000, -kInfinity), 3, 2));
  EXPECT_TRUE(all_are(0, got.sampled_ids));
  EXPECT_TRUE(all_are(kNaN, got.sampled_log_probs));
  // Masked columns are never sampled.
  std::vector<double> masked(1000, -kInfinity);
  masked[3] = 1, masked[997] = 2;
  got = solve(of_bias(masked, 50, 8));
  for (const double id : got.sampled_ids) EXPECT_TRUE(id == 3 || id == 997) << id;
}

// The largest key of all shards wins.
TEST_P(Sampling, ShardsHaveTheSamplesOfTheWhole) {
  Case c = sampling(11, {60, 701, 24}, 3);
  expect_shards(c);
  mask_rows(&c, 0.3);
  expect_shards(c);
}

TEST_P(Sampling, MasksOfRows) {
  for (const PlainSize& size : {PlainSize{3, 7, 5}, PlainSize{17, 449, 24}, PlainSize{40, 1031, 16}}) {
    for (const double share : {0.0, 0.02, 0.5}) {
      Case c = sampling(static_cast<uint64_t>(size.vocab), size, 2);
      c.problem.has.argmax = c.problem.has.entropy = 1;
      mask_rows(&c, share);
      expect_samples(c);
    }
  }
}

TEST_P(Sampling, MasksOfRandomProblems) {
  const std::vector<Case> cases = random_cases(900, is_device() ? 8 : 30, {}, [&](Case* c) {
    if (c->problem.targets_per_row > 0) return false;
    c->mode = Mode::kForward;
    c->problem.top_k = c->problem.batch_invariant = c->problem.has.saved = 0;
    c->problem.label_smoothing = c->problem.has.mean_logit = 0;
    c->problem.gradient = LOGITLESS_EXACT;
    c->problem.num_samples = 2;
    mask_rows(c, 0.3);
    return can_sample(*c);
  });
  for (const Case& c : cases) expect_samples(c);
}

TEST_P(Sampling, AMaskOfAllColumnsChangesNothing) {
  Case c = sampling(14, {70, 600, 24}, 2);
  const Outputs without = solve(c);
  mask_rows(&c, 1);
  const Outputs with = solve(c);
  EXPECT_EQ(with.sampled_ids, without.sampled_ids);
  EXPECT_EQ(with.sampled_keys, without.sampled_keys);
  EXPECT_EQ(with.lse, without.lse);
}

TEST_P(Sampling, MasksThatLeaveOneColumnOrNone) {
  Case c = sampling(15, {6, 500, 16}, 8);
  mask_rows(&c, 0);
  const auto third = c.sample_mask.begin() + 2 * 500;
  std::fill(third, third + 500, 0);
  const Outputs got = solve(c);
  for (size_t i = 0; i < 48; ++i) {
    if (i / 8 == 2) {
      EXPECT_TRUE(std::isnan(got.sampled_log_probs[i]));
      continue;
    }
    EXPECT_EQ(got.sampled_ids[i], static_cast<double>(c.targets[i / 8]));
    EXPECT_NEAR(got.sampled_log_probs[i], 0, 2e-5);  // a key less its noise
  }
  EXPECT_EQ(got.lse[2], -kInfinity);
}

// Windows of the vocabulary, chunks of rows, and rows side by side without ignored ones.
TEST_P(Sampling, EveryBudgetGivesTheSameSamplesOfMaskedRows) {
  Case c = sampling(16, {140, 1100, 16}, 1);
  for (size_t row = 0; row < 140; ++row) {
    if (row % 3 == 0) c.targets[row] = c.problem.ignore_index;
  }
  mask_rows(&c, 0.2);
  expect_samples(c);
  const Outputs got = solve(c);
  for (const size_t bytes : plan_bytes(pass_problem(c, logitless::Pass::forward))) {
    EXPECT_EQ(solve(c, bytes).sampled_ids, got.sampled_ids) << bytes;
  }
}

// Odd hidden sizes make engines copy the weight, by windows of the vocabulary.
TEST_P(Sampling, EveryBudgetOfACopiedWeightHasWholeWordsOfMasks) {
  Case c = sampling(17, {3, 700, 15}, 1);
  mask_rows(&c, 0.5);
  const Outputs got = solve(c);
  for (const size_t bytes : plan_bytes(pass_problem(c, logitless::Pass::forward))) {
    EXPECT_EQ(solve(c, bytes).sampled_ids, got.sampled_ids) << bytes;
  }
}

TEST_P(Sampling, ChangesNoLoss) {
  Case c = sampling(12, {100, 700, 24}, 4);
  const Outputs with = solve(c);
  c.problem.num_samples = 0;
  expect_same_results(c, with, solve(c), bounds_of(c));
}

LOGITLESS_TEST_ON(Sampling, engines());

}  // namespace
}  // namespace logitless_test
