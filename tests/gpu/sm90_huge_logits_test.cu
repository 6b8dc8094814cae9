// Logits whose products with log2(e) are too coarse for exponents: all that counts are their differences.
#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include "cuda/rows/anchor.h"
#include "sm90_fixture.cuh"

namespace logitless::cuda::sm90::test {
namespace {

constexpr float kScale = 3;
constexpr int64_t kColumns = 400;  // two whole tiles and a part

// Row i has the logits 3 v and 1.5 v in turn, v = +-kSizes[i / 2]. So half of its columns are its maximum,
// and the others are at least 30 below it.
constexpr std::array<float, 8> kSizes = {20, 2000, 9984, 0x1p23f, 1e9f, 1e20f, 1e30f, 1e38f};
constexpr int64_t kRows = 2 * kSizes.size();

class HugeLogits : public testing::TestWithParam<std::tuple<int64_t, bool>> {
 protected:
  void SetUp() override {
    if (!has_hopper()) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
    problem_.emplace(Shape{kRows, kColumns, std::get<0>(GetParam())}, DType::kBF16);
    std::fill(problem_->hidden_bits.begin(), problem_->hidden_bits.end(), uint16_t{0});
    std::fill(problem_->classifier_bits.begin(), problem_->classifier_bits.end(), uint16_t{0});
    for (int64_t i = 0; i < kRows; ++i) {
      const uint16_t bits = from_float(i % 2 == 0 ? kSizes[i / 2] : -kSizes[i / 2], DType::kBF16);
      const float value = to_float(bits, DType::kBF16);
      problem_->hidden_bits[i * problem_->stride] = bits;
      maxima_.push_back(std::max(kScale * value, kScale * 0.5f * value));
    }
    for (int64_t j = 0; j < kColumns; ++j)
      problem_->classifier_bits[j * problem_->stride] = from_float(j % 2 == 0 ? 1.f : 0.5f, DType::kBF16);
    hidden_.emplace(problem_->hidden_bits);
    classifier_.emplace(problem_->classifier_bits);
    bias_.emplace(std::vector<float>(kColumns, 0.f));
  }

  LogitsProduct product() const {
    Options options;
    options.transform.scale = kScale;
    LogitsProduct product = make_product(*problem_, *hidden_, *classifier_, options);
    if (std::get<1>(GetParam()))
      product.transform.bias = bias_->get();  // which only the general kernel takes
    return product;
  }

  static bool is_winner(int64_t i, int64_t j) { return i % 2 == j % 2; }
  // Of the others the anchor is far, so that exps are exact.
  static bool is_near(int64_t i) { return kSizes[i / 2] < 100; }

  // one: what winners are stored as.
  static void expect_exps(const Output& out, float one) {
    const auto values = out.data.read();
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < kColumns; ++j) {
        const float value = bf16_to_float(values[i * out.stride + j]);
        if (is_near(i)) {
          ASSERT_NEAR(value, is_winner(i, j) ? one : 0, one * 0x1p-8) << i << ", " << j;
        } else {
          ASSERT_EQ(value, is_winner(i, j) ? one : 0) << i << ", " << j;
        }
      }
    }
  }

  // Every slot that has any columns has the row's maximum among them.
  static void expect_sums(const StatSlots& stats, const std::vector<float>& sums, double near_error) {
    for (int64_t i = 0; i < kRows; ++i) {
      double sum = 0;
      for (int64_t s = 0; s < stats.slots; ++s) sum += sums[s * stats.stride + i];
      EXPECT_NEAR(sum, kColumns / 2, is_near(i) ? kColumns / 2 * near_error : 0) << i;
    }
  }

  std::optional<Problem> problem_;
  std::optional<Guarded<uint16_t>> hidden_, classifier_;
  std::optional<Guarded<float>> bias_;
  std::vector<float> maxima_;
};

TEST_P(HugeLogits, Stats) {
  StatsArgs args;
  const int64_t slots = plan_logits({product(), args}, processors(), false).slots;
  const Guarded<float> max(slots * kRows), sum(slots * kRows);
  args.stats = {.slots = slots, .stride = kRows, .max = max.get(), .sum = sum.get()};
  clear_slots(args.stats);
  launch_logits({product(), args}, nullptr);
  check_cuda(cudaDeviceSynchronize());
  const auto maxima = max.read();
  for (int64_t i = 0; i < kRows; ++i) {
    float largest = -INFINITY;
    for (int64_t s = 0; s < slots; ++s) largest = std::max(largest, maxima[s * kRows + i]);
    EXPECT_EQ(largest, maxima_[i]) << i;
  }
  // Two exp2 of 2^-22 each, sums of at most 48 terms by a thread.
  expect_sums(args.stats, sum.read(), 0x1p-18);
}

TEST_P(HugeLogits, Exps) {
  ExpsArgs args;
  const Guarded<float> anchor(maxima_);
  args.anchor = anchor.get();
  const Output out(problem_->shape);
  args.exps = out.all_columns();
  const int64_t slots = plan_logits({product(), args}, processors(), false).slots;
  const Guarded<float> max(slots * kRows), sum(slots * kRows);
  args.stats = {.slots = slots, .stride = kRows, .max = max.get(), .sum = sum.get()};
  clear_slots(args.stats);
  args.stats.max = nullptr;
  launch_logits({product(), args}, nullptr);
  check_cuda(cudaDeviceSynchronize());
  for (int64_t i = 0; i < kRows; ++i) {
    if (!is_near(i)) {
      EXPECT_EQ(effective_anchor(maxima_[i]), double{maxima_[i]}) << i;
    }
  }
  expect_exps(out, std::ldexp(1.f, kKeptExponent));
  // Beside the above, roundings of a logit of 60, of its shift and of scale log2(e).
  expect_sums(args.stats, sum.read(), 0x1p-18 + 3 * 60 * 0x1p-24);
}

TEST_P(HugeLogits, Gradient) {
  GradientArgs args;
  const Guarded<float> lse(maxima_), one(std::vector<float>(kRows, 1.f)),
      zero(std::vector<float>(kRows, 0.f));
  args.lse = lse.get();
  args.a = one.get();
  args.g = zero.get();
  if (std::get<1>(GetParam())) args.b = zero.get();
  const Output out(problem_->shape);
  args.dz = out.all_columns();
  launch_logits({product(), args}, nullptr);
  check_cuda(cudaDeviceSynchronize());
  expect_exps(out, 1);
}

// Both ways of a block of threads to work, and both kernels of each.
INSTANTIATE_TEST_SUITE_P(DepthsAndKernels, HugeLogits,
                         testing::Combine(testing::Values(int64_t{8}, kCooperativeDepth + 72),
                                          testing::Bool()));

}  // namespace
}  // namespace logitless::cuda::sm90::test
