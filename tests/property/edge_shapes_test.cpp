// Sizes at the edges: none, one, and sizes that no block size divides; memory further apart than 32 bits
// reach.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <functional>
#include <memory>

#include "engine_test.h"

namespace logitless_test {
namespace {

class EdgeShapes : public EngineTest {
 protected:
  // Checks each dtype and option, in one run and in two.
  void expect_truth_of(const std::vector<PlainSize>& sizes) const {
    const std::function<void(Case*)> options[] = {
        [](Case* c) { c->problem.has.entropy = c->problem.has.argmax = 1; },
        [](Case* c) {
          c->problem.softcap = 3;
          c->problem.has.temperature = 1;
          for (int64_t row = 0; row < c->problem.tokens; ++row) {
            c->temperature.push_back(std::exp2(static_cast<double>(row % 7) - 3));
          }
        },
        [](Case* c) {
          Random random(c->seed);
          give_targets(random, c, random.pick<int64_t>({1, 2, 64}), 0, 1);
          c->problem.reduction = LOGITLESS_REDUCTION_NONE;
          c->grad_loss.assign(static_cast<size_t>(c->problem.tokens), 0.5);
          c->hidden_layout = c->d_hidden_layout = {.padding = 5, .skew = 3};
          c->weight_layout = c->d_weight_layout = {.padding = 1, .skew = 1};
          c->skew = 3;
        }};
    for (const PlainSize& size : sizes) {
      if (is_slowed_down() && size.tokens * size.vocab * size.hidden > 50'000) continue;
      for (logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}) {
        for (const auto& option : options) {
          Case c = plain_case(static_cast<uint64_t>(size.vocab), size, dtype);
          option(&c);
          if (!engine().can_run(c.problem)) continue;
          const Expected expected(c);
          for (Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
            c.mode = mode;
            expected.check(engine(), solve(c));
          }
        }
      }
    }
  }
};

TEST_P(EdgeShapes, OnesAndPrimes) {
  expect_truth_of({{1, 1, 1},
                   {1, 1, 257},
                   {1, 257, 1},
                   {257, 1, 1},
                   {1, 257, 3},
                   {3, 1, 257},
                   {257, 3, 1},
                   {13, 17, 19},
                   {5, 257, 31},
                   {2, 1031, 3},
                   {257, 257, 3},
                   {1, 1031, 257},
                   {3, 4099, 5},
                   {253, 511, 3},
                   {3, 257, 1031},
                   {1031, 31, 5}});
}

TEST_P(EdgeShapes, OneTileAndTwo) {
  expect_truth_of({{1, 191, 64}, {127, 8, 72}, {129, 193, 64}, {257, 192, 8}, {8, 193, 24}, {63, 193, 16}});
}

// More rows and columns than one tile of a device's kernels, in whole tiles and not.
TEST_P(EdgeShapes, SeveralTilesSlow) {
  if (!is_device()) GTEST_SKIP() << "only for kernels on a device";
  expect_truth_of({{256, 384, 64}, {300, 500, 72}, {129, 1031, 40}, {700, 97, 136}});
}

// A depth at which sm90's kernels work in another way.
TEST_P(EdgeShapes, DeepProductsSlow) {
  if (engine().engine != "sm90") GTEST_SKIP() << "only for sm90's kernels";
  expect_truth_of({{130, 200, 3080}});
}

// Rows of any length begin anywhere, with anything between them; loads and stores take 16 bytes where they
// can. Some rows are ignored, so that the others are reached by their numbers.
TEST_P(EdgeShapes, RowsThatBeginAnywhereSlow) {
  for (int64_t hidden : {1, 2, 7, 8, 9, 15, 16, 17, 31, 877, 1024, 1030, 2049}) {
    for (logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16}) {
      Case c = plain_case(static_cast<uint64_t>(hidden), {11, 19, hidden}, dtype);
      for (size_t row : {0, 4, 5}) c.targets[row] = c.problem.ignore_index;
      c.problem.dtype.d_weight = LOGITLESS_F32;
      c.problem.accumulate.d_weight = 1;
      c.d_weight_start.assign(static_cast<size_t>(19 * hidden), 0.5);
      if (!engine().can_run(c.problem)) continue;
      const Expected expected(c);
      for (int64_t skew = 0; skew < 8; ++skew) {
        for (int64_t gap : {0, 1, 3, 8}) {
          c.hidden_layout = c.d_weight_layout = {gap, skew};
          c.weight_layout = c.d_hidden_layout = {gap + skew % 2, 7 - skew};
          SCOPED_TRACE(describe(c));
          expected.check(engine(), solve(c));
        }
      }
    }
  }
}

// No token at all, and no pointers to any: the loss of nothing, no gradient.
TEST_P(EdgeShapes, NoTokens) {
  for (Mode mode : {Mode::kForward, Mode::kForwardBackward, Mode::kForwardThenBackward}) {
    for (int32_t reduction : {LOGITLESS_REDUCTION_NONE, LOGITLESS_REDUCTION_SUM, LOGITLESS_REDUCTION_MEAN}) {
      for (double num_items : {0.0, 2.0}) {
        Case c = plain(1, {0, 9, 5});
        c.mode = mode;
        c.problem.reduction = reduction;
        if (reduction == LOGITLESS_REDUCTION_MEAN) c.problem.num_items = num_items;
        c.problem.dtype.d_weight = LOGITLESS_F32;
        c.problem.accumulate.d_weight = num_items == 2;
        if (num_items == 2) c.d_weight_start.assign(45, 7);
        const Outputs got = solve(c);
        Expected(c).check(engine(), got);
        EXPECT_EQ(got.valid_count, std::vector<double>{0});
        if (reduction == LOGITLESS_REDUCTION_MEAN && num_items == 0) {
          EXPECT_TRUE(std::isnan(got.loss[0]));
        }
        for (double d : got.d_weight) EXPECT_EQ(d, num_items == 2 ? 7 : 0);
      }
    }
  }
}

// Returns address space in which only the pages in use exist; null where there is none.
std::shared_ptr<float> sparse_matrix(int64_t rows, int64_t stride) {
  const size_t bytes = static_cast<size_t>(rows * stride) * sizeof(float);
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<float*>(memory), [bytes](float* data) { munmap(data, bytes); }};
}

// Rows are so far apart that their offsets need more than 32 bits.
TEST_P(EdgeShapes, StridesBeyondThirtyTwoBits) {
  if (is_device()) GTEST_SKIP() << "on host memory; tests/gpu has it on a device";
  constexpr int64_t kStride = (int64_t{1} << 30) + 3;
  constexpr int64_t kTokens = 4, kVocab = 5, kHidden = 6;
  const Case c = plain_case(3, {kTokens, kVocab, kHidden});
  const auto hidden = sparse_matrix(kTokens, kStride), weight = sparse_matrix(kVocab, kStride),
             d_hidden = sparse_matrix(kTokens, kStride), d_weight = sparse_matrix(kVocab, kStride);
  if (!hidden || !weight || !d_hidden || !d_weight) {
    GTEST_SKIP() << "no address space for it";
  }
  const auto spread = [](const std::vector<double>& values, float* to) {
    for (size_t i = 0; i < values.size(); ++i) {
      to[static_cast<int64_t>(i) / kHidden * kStride + static_cast<int64_t>(i) % kHidden] =
          static_cast<float>(values[i]);
    }
  };
  spread(c.hidden, hidden.get());
  spread(c.weight, weight.get());
  const std::vector<float> bias(c.bias.begin(), c.bias.end());
  std::vector<float> d_bias(kVocab);
  float loss = 0;
  logitless::Buffers b;
  b.hidden = hidden.get();
  b.weight = weight.get();
  b.d_hidden = d_hidden.get();
  b.d_weight = d_weight.get();
  b.hidden_stride = b.weight_stride = b.d_hidden_stride = b.d_weight_stride = kStride;
  b.bias = bias.data();
  b.targets = c.targets.data();
  b.d_bias = d_bias.data();
  b.loss = &loss;
  logitless::run_once(context_, pass_problem(c, logitless::Pass::forward_backward), b);
  const Outputs tight = solve(c);
  EXPECT_EQ(loss, tight.loss[0]);
  const auto gathered = [](const float* from, int64_t rows) {
    std::vector<double> out;
    for (int64_t i = 0; i < rows * kHidden; ++i) out.push_back(from[i / kHidden * kStride + i % kHidden]);
    return out;
  };
  EXPECT_EQ(gathered(d_hidden.get(), kTokens), tight.d_hidden);
  EXPECT_EQ(gathered(d_weight.get(), kVocab), tight.d_weight);
}

// More than 2^31 logits. Rows repeat after seven, so seven rows give the results that all must have.
TEST_P(EdgeShapes, MoreThanTwoToThe31Logits) {
#ifndef NDEBUG
  GTEST_SKIP() << "too slow without optimization";
#endif
  if (is_slowed_down()) GTEST_SKIP() << "too slow";
  if (engine().name() != best_engine().name() || engine().is_reference()) GTEST_SKIP() << "too slow";
  constexpr int64_t kTokens = 70000, kVocab = 32000, kHidden = 4, kPeriod = 7;
  static_assert(kTokens * kVocab > int64_t{1} << 31);
  Case c = plain_case(4, {kPeriod, kVocab, kHidden});
  c.mode = Mode::kForward;
  const Expected expected(c);
  std::vector<size_t> rows;
  for (size_t row = 0; row < kTokens; ++row) rows.push_back(row % kPeriod);
  const Outputs got = solve(rows_of(c, rows));
  EXPECT_TRUE(close("nll", got.nll, rows_of(expected.truth().nll, kPeriod, rows),
                    expected.bounds_of(engine()).nll, LOGITLESS_F32));
}

LOGITLESS_TEST_ON(EdgeShapes, engines());

}  // namespace
}  // namespace logitless_test
