// Sizes at the edges: none, one, and nothing that a block size divides; memory further apart than 32 bits
// reach.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>

#include "compare.h"

namespace logitless_test {
namespace {

class EdgeShapes : public testing::TestWithParam<Engine> {
 protected:
  const Engine& engine() const { return GetParam(); }
  logitless::Context context_ = make_context(GetParam());
};

TEST_P(EdgeShapes, OnesAndPrimes) {
  const PlainSize sizes[] = {{1, 1, 1},    {1, 1, 257},   {1, 257, 1},    {257, 1, 1},
                             {1, 257, 3},  {3, 1, 257},   {257, 3, 1},    {13, 17, 19},
                             {5, 257, 31}, {2, 1031, 3},  {257, 257, 3},  {1, 1031, 257},
                             {3, 4099, 5}, {253, 511, 3}, {3, 257, 1031}, {1031, 31, 5}};
  for (const PlainSize& size : sizes) {
    if (is_slowed_down() && size.tokens * size.vocab * size.hidden > 50'000) continue;
    for (logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}) {
      Case c = plain_case(static_cast<uint64_t>(size.vocab), size, dtype);
      c.problem.has.entropy = c.problem.has.argmax = 1;
      if (!engine().can_run(c.problem)) continue;
      const Expected expected(c);
      for (Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
        c.mode = mode;
        expected.check(engine(), solve(context_, c));
      }
    }
  }
}

// No token at all: the loss of nothing, no gradient.
TEST_P(EdgeShapes, NoTokens) {
  for (Mode mode : {Mode::kForward, Mode::kForwardBackward, Mode::kForwardThenBackward}) {
    for (int32_t reduction : {LOGITLESS_REDUCTION_NONE, LOGITLESS_REDUCTION_SUM, LOGITLESS_REDUCTION_MEAN}) {
      for (double num_items : {0.0, 2.0}) {
        Case c = plain_case(1, {0, 9, 5}, engine().plain_dtype());
        c.mode = mode;
        c.problem.reduction = reduction;
        if (reduction == LOGITLESS_REDUCTION_MEAN) c.problem.num_items = num_items;
        if (mode == Mode::kForward) {
          c.problem.has.d_hidden = c.problem.has.d_classifier = c.problem.has.d_bias = 0;
        }
        const Outputs got = solve(context_, c);
        Expected(c).check(engine(), got);
        EXPECT_EQ(got.valid_count, std::vector<double>{0});
        if (reduction == LOGITLESS_REDUCTION_MEAN && num_items == 0) {
          EXPECT_TRUE(std::isnan(got.loss[0]));
        }
        for (double d : got.d_classifier) EXPECT_EQ(d, 0);
      }
    }
  }
}

TEST_P(EdgeShapes, NoTokensAndNoPointersToThem) {
  if (engine().is_device()) GTEST_SKIP() << "on host memory; tests/gpu has it on a device";
  Case c = plain_case(1, {0, 9, 5});
  logitless::Problem problem = pass_problem(c, logitless::Pass::forward_backward);
  problem.accumulate.d_classifier = 1;
  const std::vector<float> classifier(45), bias(9);
  std::vector<float> d_classifier(45, 7), d_bias(9, 7);
  float loss = 0;
  logitless::Buffers b;
  b.classifier = classifier.data();
  b.bias = bias.data();
  b.loss = &loss;
  b.d_classifier = d_classifier.data();
  b.d_bias = d_bias.data();
  logitless::run_once(context_, problem, b);
  EXPECT_TRUE(std::isnan(loss));
  EXPECT_EQ(d_classifier, std::vector<float>(45, 7));  // added to
  EXPECT_EQ(d_bias, std::vector<float>(9, 0));         // written
}

// Every row ignored: a mean over nothing is NaN, yet gradients are 0, as in PyTorch.
TEST_P(EdgeShapes, AllRowsIgnored) {
  for (int32_t reduction : {LOGITLESS_REDUCTION_NONE, LOGITLESS_REDUCTION_SUM, LOGITLESS_REDUCTION_MEAN}) {
    for (logitless_dtype dtype : {engine().plain_dtype(), LOGITLESS_BF16}) {
      Case c = plain_case(2, {11, 29, 7}, dtype);
      c.problem.reduction = reduction;
      c.problem.has.argmax = 1;
      for (int64_t& target : c.targets) target = c.problem.ignore_index;
      const Outputs got = solve(context_, c);
      for (double loss : got.loss) {
        if (reduction == LOGITLESS_REDUCTION_MEAN) {
          EXPECT_TRUE(std::isnan(loss));
        } else {
          EXPECT_EQ(loss, 0);
        }
      }
      EXPECT_EQ(got.correct_count, std::vector<double>{0});
      for (const auto* gradient : {&got.d_hidden, &got.d_classifier, &got.d_bias}) {
        for (double d : *gradient) EXPECT_EQ(d, 0);
      }
    }
  }
}

// Address space of which only the pages in use exist.
template <class T>
class SparseMatrix {
 public:
  SparseMatrix(int64_t rows, int64_t stride)
      : bytes_(static_cast<size_t>(rows * stride) * sizeof(T)),
        memory_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                     0)) {}
  ~SparseMatrix() {
    if (usable()) munmap(memory_, bytes_);
  }
  SparseMatrix(const SparseMatrix&) = delete;
  SparseMatrix& operator=(const SparseMatrix&) = delete;
  bool usable() const { return memory_ != MAP_FAILED; }
  T* data() { return static_cast<T*>(memory_); }

 private:
  size_t bytes_;
  void* memory_;
};

// Rows so far apart that their offsets need more than 32 bits.
TEST_P(EdgeShapes, StridesBeyondThirtyTwoBits) {
  if (engine().is_device()) GTEST_SKIP() << "on host memory; tests/gpu has it on a device";
  constexpr int64_t kStride = (int64_t{1} << 30) + 3;
  constexpr int64_t kTokens = 4, kVocab = 5, kHidden = 6;
  const Case c = plain_case(3, {kTokens, kVocab, kHidden});
  SparseMatrix<float> hidden(kTokens, kStride), classifier(kVocab, kStride), d_hidden(kTokens, kStride),
      d_classifier(kVocab, kStride);
  if (!hidden.usable() || !classifier.usable() || !d_hidden.usable() || !d_classifier.usable()) {
    GTEST_SKIP() << "no address space for it";
  }
  const auto spread = [](const std::vector<double>& values, float* to) {
    for (size_t i = 0; i < values.size(); ++i) {
      to[static_cast<int64_t>(i) / kHidden * kStride + static_cast<int64_t>(i) % kHidden] =
          static_cast<float>(values[i]);
    }
  };
  spread(c.hidden, hidden.data());
  spread(c.classifier, classifier.data());
  const std::vector<float> bias(c.bias.begin(), c.bias.end());
  std::vector<float> d_bias(kVocab);
  float loss = 0;
  logitless::Buffers b;
  b.hidden = hidden.data();
  b.classifier = classifier.data();
  b.d_hidden = d_hidden.data();
  b.d_classifier = d_classifier.data();
  b.hidden_stride = b.classifier_stride = b.d_hidden_stride = b.d_classifier_stride = kStride;
  b.bias = bias.data();
  b.targets = c.targets.data();
  b.d_bias = d_bias.data();
  b.loss = &loss;
  logitless::run_once(context_, pass_problem(c, logitless::Pass::forward_backward), b);
  const Outputs tight = solve(context_, c);
  EXPECT_EQ(loss, tight.loss[0]);
  const auto gathered = [](const float* from, int64_t rows) {
    std::vector<double> out;
    for (int64_t i = 0; i < rows * kHidden; ++i) out.push_back(from[i / kHidden * kStride + i % kHidden]);
    return out;
  };
  EXPECT_EQ(gathered(d_hidden.data(), kTokens), tight.d_hidden);
  EXPECT_EQ(gathered(d_classifier.data(), kVocab), tight.d_classifier);
}

// More than 2^31 logits. Rows repeat after seven, so seven rows say what all must give.
TEST_P(EdgeShapes, MoreThanTwoToThe31Logits) {
#ifndef NDEBUG
  GTEST_SKIP() << "too slow without optimization";
#endif
  if (is_slowed_down()) GTEST_SKIP() << "too slow";
  if (engine().name() != best_engine().name() || engine().is_reference()) GTEST_SKIP() << "too slow";
  constexpr int64_t kTokens = 70000, kVocab = 32000, kHidden = 4, kPeriod = 7;
  static_assert(kTokens * kVocab > int64_t{1} << 31);
  Case c = plain_case(4, {kPeriod, kVocab, kHidden});
  c.problem.has.d_hidden = c.problem.has.d_classifier = c.problem.has.d_bias = 0;
  c.mode = Mode::kForward;
  const Expected expected(c);
  const std::vector<float> classifier(c.classifier.begin(), c.classifier.end());
  const std::vector<float> bias(c.bias.begin(), c.bias.end());
  std::vector<float> hidden, nll(kTokens);
  std::vector<int64_t> targets;
  for (int64_t row = 0; row < kTokens; ++row) {
    const auto from = c.hidden.begin() + row % kPeriod * kHidden;
    hidden.insert(hidden.end(), from, from + kHidden);
    targets.push_back(c.targets[static_cast<size_t>(row % kPeriod)]);
  }
  logitless::Problem problem = pass_problem(c, logitless::Pass::forward);
  problem.tokens = kTokens;
  logitless::Buffers b;
  b.hidden = hidden.data();
  b.classifier = classifier.data();
  b.bias = bias.data();
  b.targets = targets.data();
  b.nll = nll.data();
  logitless::run_once(context_, problem, b);
  std::vector<double> all;
  for (int64_t row = 0; row < kTokens; ++row)
    all.push_back(expected.truth().nll[static_cast<size_t>(row % kPeriod)]);
  EXPECT_TRUE(close("nll", {nll.begin(), nll.end()}, all, expected.bounds_of(GetParam()).nll, LOGITLESS_F32));
}

INSTANTIATE_TEST_SUITE_P(Engines, EdgeShapes, testing::ValuesIn(engines()),
                         [](const auto& parameter) { return parameter.param.name(); });

}  // namespace
}  // namespace logitless_test
