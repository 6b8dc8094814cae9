// The fused kernel's draw, element by element, against the definition: core/sparsification.h, and
// epilogue_draw.cuh for the order in which a thread takes its columns.
#include <map>

#include "core/sparsification.h"
#include "sm90_fixture.cuh"

namespace logitless::cuda::sm90::test {
namespace {

constexpr uint64_t kSeed = 0x9876543210abcdefull;
constexpr float kUntouched = 12345;      // a launch does not write it
constexpr uint32_t kFirstStream = 7000;  // global number of the shard's column 0

struct DrawOptions {
  bool general = false;
  DType dtype = DType::kBF16;
  float certain_share = 1;
  bool other_rows = false;  // lists belong to other rows than the hidden ones
  int64_t rows = -1;        // rows that exist; -1: all
  int64_t capacity = -1;    // -1: room for everything
  bool inactive_blocks = false;
};

std::vector<double> exact_lse(const Problem& problem, const Transform& transform) {
  std::vector<double> lse(problem.shape.rows);
  for (int64_t i = 0; i < problem.shape.rows; ++i) {
    double largest = -INFINITY, sum = 0;
    for (int64_t j = 0; j < problem.shape.columns; ++j)
      largest = std::max(largest, transform.logit(problem, i, j));
    for (int64_t j = 0; j < problem.shape.columns; ++j)
      sum += std::exp(transform.logit(problem, i, j) - largest);
    lse[i] = largest + std::log(sum);
  }
  return lse;
}

// One launch and its results.
class Sparsification {
 public:
  Sparsification(Shape shape, const DrawOptions& wishes)
      : shape_(shape), wishes_(wishes), problem_(shape, wishes.dtype) {
    transform_ = make_transform(shape, wishes.general);
    targets_ = make_targets(shape, true);
    const std::vector<double> lse = exact_lse(problem_, transform_);
    std::mt19937 engine(3);
    std::uniform_real_distribution<double> off(-1, 0.6);
    for (int64_t i = 0; i < shape.rows; ++i) {
      logit_offset_.push_back(static_cast<float>(lse[i] + off(engine)));
      threshold_.push_back(i % 11 == 3 ? INFINITY : std::ldexp(1.f, -4 - static_cast<int>(i % 6)));
      list_of_.push_back(static_cast<int32_t>(wishes.other_rows ? shape.rows - 1 - i : i));
    }
    for (int64_t j = 0; j < kColumnOffset + shape.columns; ++j) role_.push_back(j % 17 == 5 ? 3 : -1);
    for (int64_t b = 0; b * 128 < shape.rows; ++b) active_.push_back(b % 3 != 1);
    if (wishes_.rows < 0) wishes_.rows = shape.rows;
    if (wishes_.capacity < 0) wishes_.capacity = shape.columns + 2;
  }

  void launch(bool with_sums) {
    const Guarded<uint16_t> hidden(problem_.hidden_bits), weight(problem_.weight_bits);
    const Guarded<float> bias(transform_.bias), logit_offset(logit_offset_), threshold(threshold_);
    const Guarded<int32_t> target(targets_), role(role_), list_of(list_of_);
    const Guarded<int32_t> row_count(std::vector<int32_t>{static_cast<int32_t>(wishes_.rows)});
    const Guarded<uint8_t> active(active_);
    const Guarded<uint64_t> seed(std::vector<uint64_t>{kSeed});
    Guarded<int32_t> count(std::vector<int32_t>(shape_.rows, 0));
    Guarded<Draw> elements(shape_.rows * wishes_.capacity);
    Guarded<float> target_logit(std::vector<float>(shape_.rows, kUntouched));
    LogitsProduct product = make_product(problem_, hidden, weight, transform_);
    if (!transform_.bias.empty()) product.transform.bias = bias.get();
    if (wishes_.rows < shape_.rows) product.row_count = row_count.get();
    if (wishes_.inactive_blocks) product.row_block_active = active.get();
    product.target = target.get();
    DrawArgs args;
    args.target_logit = target_logit.get();
    args.logit_offset = logit_offset.get();
    args.draws.seed = seed.get();
    args.draws.first_stream = kFirstStream;
    args.draws.role = role.get();
    if (wishes_.other_rows) args.draws.row = list_of.get();
    args.draws.threshold = threshold.get();
    args.draws.certain_share = wishes_.certain_share;
    args.draws.count = count.get();
    args.draws.elements = elements.get();
    args.draws.capacity = static_cast<int32_t>(wishes_.capacity);
    const int partials = plan_logits({product, args}, processors(), true).partials;
    Guarded<float> sum(std::vector<float>(partials * shape_.rows, 0.f));
    Guarded<float> expected(std::vector<float>(partials * shape_.rows, 0.f));
    if (with_sums) {
      args.stats.partials = partials;
      args.stats.stride = shape_.rows;
      args.stats.sum = sum.get();
      args.stats.expected = expected.get();
    }
    launch_logits({product, args}, nullptr);
    check_cuda(cudaDeviceSynchronize());
    count_ = count.read();
    elements_ = elements.read();
    target_logit_ = target_logit.read();
    if (with_sums) {
      sum_ = joined(sum.read(), shape_.rows);
      expected_ = joined(expected.read(), shape_.rows);
    }
    for (const auto* array : {&sum, &expected, &target_logit}) array->expect_guards();
    count.expect_guards();
    elements.expect_guards();
  }

  bool is_live(int64_t i) const {
    return i < wishes_.rows && targets_[i] != kIgnoredRow &&
           (!wishes_.inactive_blocks || active_[i / 128] != 0);
  }

  void check_row(int64_t i) const {
    const int32_t count = count_[list_of_[i]];
    if (!is_live(i)) {
      ASSERT_EQ(count, 0);
      ASSERT_EQ(sum_[i], 0);
      ASSERT_EQ(expected_[i], 0);
      ASSERT_EQ(target_logit_[i], kUntouched);
      return;
    }
    const int64_t y = targets_[i] - kColumnOffset;
    if (y >= 0 && y < shape_.columns) {
      ASSERT_NEAR(target_logit_[i], transform_.logit(problem_, i, y), transform_.error(problem_, i, y));
    } else {
      ASSERT_EQ(target_logit_[i], kUntouched);
    }
    std::map<int64_t, bool> kept;  // column of the window, and whether the list marks it as certain
    const Draw* list = elements_.data() + list_of_[i] * wishes_.capacity;
    for (int32_t k = 0; k < count; ++k) {
      const int64_t column = list[k].column_and_certain / 2 - kColumnOffset;
      ASSERT_GE(column, 0);
      ASSERT_LT(column, shape_.columns);
      ASSERT_TRUE(kept.emplace(column, list[k].column_and_certain % 2 != 0).second) << "column " << column;
      ASSERT_NEAR(list[k].logit, transform_.logit(problem_, i, column),
                  transform_.error(problem_, i, column));
    }
    double sum = 0, expected = 0, sum_error = 0, expected_error = 0;
    const double threshold = threshold_[i], certain = threshold * wishes_.certain_share;
    for (int64_t j = 0; j < shape_.columns; ++j) {
      const Element e = element(i, j);
      sum += e.q;
      sum_error += e.error;
      expected += e.q >= certain ? threshold : e.q;
      const bool either = std::abs(e.q - certain) <= e.error;
      expected_error += either ? e.error + std::abs(threshold - e.q) : e.error;
    }
    ASSERT_NEAR(sum_[i], sum, sum_error + 0x1p-17 * sum);
    ASSERT_NEAR(expected_[i], expected, expected_error + 0x1p-17 * expected);
    for (int64_t first = 0; first < shape_.columns; first += kTileColumns) {
      for (int64_t lane = 0; lane < 4; ++lane) {
        check_group(i, first + 2 * lane, kept);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }

  void check_rows() const {
    for (int64_t i = 0; i < shape_.rows; ++i) {
      check_row(i);
      ASSERT_FALSE(testing::Test::HasFatalFailure()) << "row " << i;
    }
  }

  std::vector<int32_t> count_;
  std::vector<Draw> elements_;
  std::vector<float> sum_, expected_, target_logit_;

 private:
  struct Element {
    double q, error;
  };

  // Exponents are made of fp32 terms of the size of the logit and the logit offset.
  Element element(int64_t i, int64_t j) const {
    const double z = transform_.logit(problem_, i, j), logit_offset = logit_offset_[i];
    const double q = std::exp(z - logit_offset);
    const double slack = 0x1p-22 * (2 + std::abs(z) + std::abs(logit_offset));
    return {q, q * (transform_.error(problem_, i, j) + slack)};
  }

  // Checks the 48 columns that one thread draws from, 8 apart in pairs. It follows the thread's decisions,
  // each of which must be right but for the error of the running sum.
  // The decision for a dense column is not known. Where it could be either, the rest of the group is not
  // checked.
  void check_group(int64_t i, int64_t first, const std::map<int64_t, bool>& kept) const {
    const double threshold = threshold_[i], certain = threshold * wishes_.certain_share;
    const uint32_t stream = kFirstDrawStream + kFirstStream + static_cast<uint32_t>(kColumnOffset + first);
    double running =
        threshold * (1 - draw_uniform(draw_bits(kSeed, static_cast<uint32_t>(list_of_[i]), stream)));
    double error = 0x1p-22 * threshold;
    for (int64_t k = 0; k < kTileColumns / 4; ++k) {
      const int64_t j = first + k / 2 * 8 + k % 2;
      if (j >= shape_.columns) break;
      const Element e = element(i, j);
      const bool surely_large = e.q - e.error >= certain, surely_small = e.q + e.error < certain;
      const auto at = kept.find(j);
      const bool is_kept = at != kept.end();
      if (std::isinf(threshold)) {
        ASSERT_FALSE(is_kept) << "column " << j;
        continue;
      }
      if (role_[kColumnOffset + j] >= 0) {
        ASSERT_FALSE(is_kept) << "dense column " << j;
        if (surely_large) continue;
        running += e.q;
        error += e.error + 0x1p-22 * threshold;
        if (!surely_small || std::abs(running - threshold) <= error) return;
        if (running > threshold) running -= threshold;
        continue;
      }
      if (is_kept && at->second) {
        ASSERT_FALSE(surely_small) << "column " << j;
        continue;
      }
      ASSERT_FALSE(surely_large) << "column " << j;
      running += e.q;
      error += e.error + 0x1p-22 * threshold;
      if (is_kept) {
        ASSERT_GE(running + error, threshold) << "column " << j << " was drawn too early";
        running -= threshold;
      } else {
        ASSERT_LT(running - error, threshold) << "column " << j << " was passed over";
      }
    }
  }

  Shape shape_;
  DrawOptions wishes_;
  Problem problem_;
  Transform transform_;
  std::vector<float> logit_offset_, threshold_;
  std::vector<int32_t> targets_, role_, list_of_;
  std::vector<uint8_t> active_;
};

class Draws : public OnHopper<Shape> {};

void run(Shape shape, const DrawOptions& wishes) {
  Sparsification sparsification(shape, wishes);
  sparsification.launch(true);
  if (!testing::Test::HasFatalFailure()) sparsification.check_rows();
}

TEST_P(Draws, Plain) {
  run(GetParam(), {});
  run(GetParam(), {.certain_share = 0.5f});
}
TEST_P(Draws, General) {
  run(GetParam(), {.general = true});
  run(GetParam(), {.general = true, .certain_share = 0.5f});
}
TEST_P(Draws, Half) {
  run(GetParam(), {.dtype = DType::kF16});
}
TEST_P(Draws, ListsOfOtherRows) {
  run(GetParam(), {.certain_share = 0.5f, .other_rows = true});
}
TEST_P(Draws, FewerRows) {
  for (const int64_t rows : {int64_t{0}, GetParam().rows / 3, GetParam().rows - 1})
    run(GetParam(), {.rows = rows});
}
TEST_P(Draws, InactiveBlocks) {
  run(GetParam(), {.inactive_blocks = true});
}

// Sums have the same bits, and lists the same elements, whatever order they came in; with or without sums.
TEST_P(Draws, RepeatsItself) {
  Sparsification sparsification(GetParam(), {.certain_share = 0.5f});
  sparsification.launch(true);
  const auto lists = [&] {
    std::vector<std::map<int32_t, float>> rows(sparsification.count_.size());
    const size_t capacity = sparsification.elements_.size() / rows.size();
    for (size_t i = 0; i < rows.size(); ++i) {
      for (int32_t k = 0; k < sparsification.count_[i]; ++k) {
        const Draw& element = sparsification.elements_[i * capacity + k];
        rows[i][element.column_and_certain] = element.logit;
      }
    }
    return rows;
  };
  const auto first_lists = lists();
  const std::vector<float> sums = sparsification.sum_, expected = sparsification.expected_;
  for (const bool with_sums : {true, false}) {
    sparsification.launch(with_sums);
    ASSERT_EQ(sparsification.sum_, sums);
    ASSERT_EQ(sparsification.expected_, expected);
    ASSERT_EQ(lists(), first_lists);
  }
}

// A list that is too short gets what fits. The count is that of a list with room, and the last place, which
// is the target's, stays as it was.
TEST_P(Draws, ShortLists) {
  constexpr int64_t kCapacity = 4;
  Sparsification all(GetParam(), {}), few(GetParam(), {.capacity = kCapacity});
  all.launch(true);
  few.launch(true);
  ASSERT_EQ(few.count_, all.count_);
  for (size_t i = 0; i < few.count_.size(); ++i) {
    for (int64_t k = std::min<int64_t>(few.count_[i], kCapacity - 1); k < kCapacity; ++k) {
      ASSERT_EQ(few.elements_[i * kCapacity + k].column_and_certain, static_cast<int32_t>(0xA5A5A5A5u)) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Draws, testing::ValuesIn(kShapes), name_of);

}  // namespace
}  // namespace logitless::cuda::sm90::test
