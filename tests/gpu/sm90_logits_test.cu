// The fused logits kernels against double precision: all epilogues, plain and general, hostile shapes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/row_stats.h"
#include "cuda/rows/anchor.h"
#include "sm90_fixture.cuh"

namespace logitless::cuda::sm90::test {
namespace {

// Slots on the device and their join on the host.
struct Slots {
  Slots(const LogitsProduct& product, const EpilogueArgs& args, bool any_fewer, bool everything)
      : count(plan_logits({product, args}, processors(), any_fewer).slots),
        stride(product.rows + 3),
        max(count * stride),
        sum(count * stride),
        sum_offset(count * stride),
        weighted(count * stride),
        logit_sum(count * stride),
        sum_sq(count * stride),
        argmax(count * stride) {
    view = {.slots = count, .stride = stride, .max = max.get(), .sum = sum.get()};
    if (everything) {
      view.sum_offset = sum_offset.get();
      view.weighted = weighted.get();
      view.logit_sum = logit_sum.get();
      view.sum_sq = sum_sq.get();
      view.argmax = argmax.get();
    }
    clear_slots(view);
  }

  std::vector<RowStats<double>> join() const {
    const auto maxima = max.read(), sums = sum.read(), offsets = sum_offset.read(), weights = weighted.read();
    const auto ids = argmax.read();
    const auto logits = logit_sum.read(), squares = sum_sq.read();
    std::vector<RowStats<double>> rows(stride - 3);
    for (size_t i = 0; i < rows.size(); ++i) {
      for (int64_t s = 0; s < count; ++s) {
        const size_t at = s * stride + i;
        RowStats<double> part;
        part.max = maxima[at];
        part.sum_exp = sums[at];
        if (view.sum_offset != nullptr) part.sum_offset = offsets[at];
        if (view.weighted != nullptr) part.weighted = weights[at];
        if (view.logit_sum != nullptr) part.logit_sum = logits[at];
        if (view.sum_sq != nullptr) part.sum_sq = squares[at];
        if (view.argmax != nullptr) part.argmax = ids[at];
        rows[i] = merge(rows[i], part);
      }
    }
    return rows;
  }

  int64_t count, stride;
  Guarded<float> max, sum, sum_offset, weighted, logit_sum, sum_sq;
  Guarded<int32_t> argmax;
  StatSlots view;
};

float untouched_float() {
  const uint32_t bits = 0xA5A5A5A5u;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void check_stats(const Problem& problem, const Options& options, const std::vector<int32_t>& targets,
                 const std::vector<RowStats<double>>& stats, const std::vector<float>& target_logit,
                 int64_t rows) {
  const Shape& shape = problem.shape;
  const float untouched = untouched_float();
  for (int64_t i = 0; i < shape.rows; ++i) {
    if (i >= rows) {
      ASSERT_EQ(stats[i].sum_exp, 0) << i;
      ASSERT_EQ(target_logit[i], untouched) << i;
      continue;
    }
    double largest = -INFINITY, error = 0, weighted = 0, weighted_size = 0, logits = 0, logits_size = 0;
    for (int64_t j = 0; j < shape.columns; ++j) {
      const double z = options.transform.logit(problem, i, j);
      const double weight = options.class_weight.empty() ? 1 : options.class_weight[j];
      largest = std::max(largest, z);
      error = std::max(error, options.transform.error(problem, i, j));
      weighted += weight * z;
      weighted_size += std::abs(weight * z);
      logits += z;
      logits_size += std::abs(z);
    }
    double sum = 0, mean = 0, mean_size = 0, squares = 0;
    for (int64_t j = 0; j < shape.columns; ++j) {
      const double z = options.transform.logit(problem, i, j);
      sum += std::exp(z - largest);
      squares += std::exp(2 * (z - largest));
      mean += std::exp(z - largest) * z;
      mean_size += std::exp(z - largest) * std::abs(z);
    }
    const double lse = largest + std::log(sum);
    // exp2 and the sums over a tile, a quad and the tiles of a slot add less than 2^-17 of the sum.
    ASSERT_NEAR(log_sum_exp(stats[i]), lse, error + 0x1p-17 + 0x1p-22 * std::abs(lse)) << "row " << i;
    const int32_t y = targets[i] - kColumnOffset;
    if (y >= 0 && y < shape.columns) {
      ASSERT_NEAR(target_logit[i], options.transform.logit(problem, i, y),
                  options.transform.error(problem, i, y));
    } else {
      ASSERT_EQ(target_logit[i], untouched) << i;
    }
    if (!options.general) continue;
    ASSERT_NEAR(stats[i].max + stats[i].sum_offset / stats[i].sum_exp, mean / sum,
                error * (1 + 2 * mean_size / sum) + 0x1p-16 * mean_size / sum);
    ASSERT_NEAR(stats[i].weighted, weighted, shape.columns * 4 * error + 0x1p-18 * weighted_size);
    ASSERT_NEAR(stats[i].logit_sum, logits, shape.columns * error + 0x1p-18 * logits_size);
    ASSERT_NEAR(std::log(stats[i].sum_sq) - 2 * std::log(stats[i].sum_exp),
                std::log(squares) - 2 * std::log(sum), 4 * error + 0x1p-15);
    ASSERT_GE(stats[i].argmax, kColumnOffset);
    ASSERT_LT(stats[i].argmax, kColumnOffset + shape.columns);
    ASSERT_GE(options.transform.logit(problem, i, stats[i].argmax - kColumnOffset), largest - 2 * error);
  }
}

void run_stats(Shape shape, DType dtype, bool general, int64_t rows, int64_t window) {
  const Problem problem(shape, dtype);
  const Options options = make_options(shape, general, dtype);
  const std::vector<int32_t> targets = make_targets(shape, false);
  const Guarded<uint16_t> hidden(problem.hidden_bits), classifier(problem.classifier_bits);
  const Guarded<float> bias(options.transform.bias), weights(options.class_weight);
  const Guarded<int32_t> device_targets(targets), row_count(std::vector<int32_t>{static_cast<int32_t>(rows)});
  LogitsProduct product = make_product(problem, hidden, classifier, options);
  if (rows < shape.rows) product.row_count = row_count.get();
  std::vector<uint8_t> first_bits;
  for (int repeat = 0; repeat < 2; ++repeat) {
    Slots slots(product, StatsArgs{}, product.row_count != nullptr, options.general);
    const Guarded<float> target_logit(shape.rows);
    for (int64_t begin = 0; begin < shape.columns; begin += window) {
      LogitsProduct part = product;
      StatsArgs args;
      part.columns = std::min(window, shape.columns - begin);
      part.classifier = classifier.get() + begin * problem.stride;
      if (!options.transform.bias.empty()) part.transform.bias = bias.get() + begin;
      if (!options.class_weight.empty()) args.class_weight = weights.get() + begin;
      part.target = device_targets.get();
      part.column_offset = kColumnOffset + begin;
      args.stats = slots.view;
      args.target_logit = target_logit.get();
      launch_logits({part, args}, nullptr);
      check_cuda(cudaDeviceSynchronize());
    }
    check_stats(problem, options, targets, slots.join(), target_logit.read(), rows);
    if (testing::Test::HasFatalFailure()) return;
    for (const auto* array :
         {&slots.max, &slots.sum, &slots.sum_offset, &slots.weighted, &slots.logit_sum, &slots.sum_sq})
      array->expect_guards();
    slots.argmax.expect_guards();
    target_logit.expect_guards();
    const auto sums = slots.sum.read();
    const std::vector<uint8_t> bits(reinterpret_cast<const uint8_t*>(sums.data()),
                                    reinterpret_cast<const uint8_t*>(sums.data() + sums.size()));
    if (repeat == 0) first_bits = bits;
    ASSERT_EQ(bits, first_bits) << "another run gives other bits";
  }
}

TEST_P(Logits, StatsPlain) {
  run_stats(GetParam(), DType::kBF16, false, GetParam().rows, GetParam().columns);
}
TEST_P(Logits, StatsGeneral) {
  run_stats(GetParam(), DType::kBF16, true, GetParam().rows, GetParam().columns);
}
TEST_P(Logits, StatsHalf) {
  run_stats(GetParam(), DType::kF16, false, GetParam().rows, GetParam().columns);
}
TEST_P(Logits, StatsOfWindows) {
  const Shape shape = GetParam();
  const int64_t window = std::max<int64_t>(1, shape.columns * 2 / 5);
  run_stats(shape, DType::kBF16, false, shape.rows, window);
  run_stats(shape, DType::kBF16, true, shape.rows, window);
}
TEST_P(Logits, StatsOfFewerRows) {
  const Shape shape = GetParam();
  for (const int64_t rows : {int64_t{0}, shape.rows / 3, shape.rows - 1}) {
    run_stats(shape, DType::kBF16, false, rows, shape.columns);
    run_stats(shape, DType::kBF16, true, rows, shape.columns);
  }
}

// Logits of -inf and NaN: a row of -inf has sum 0 and maximum -inf, a NaN reaches its row's sum and no other.
TEST_F(Logits, SpecialLogits) {
  const Shape shape{130, 400, 64};
  Problem problem(shape, DType::kBF16);
  problem.hidden_bits[5 * problem.stride] = from_float(NAN, DType::kBF16);
  const std::vector<float> bias(shape.columns, -INFINITY);
  const Guarded<uint16_t> hidden(problem.hidden_bits), classifier(problem.classifier_bits);
  const Guarded<float> device_bias(bias);
  for (const bool with_bias : {false, true}) {
    LogitsProduct product = make_product(problem, hidden, classifier, Options{});
    if (with_bias) product.transform.bias = device_bias.get();
    Slots slots(product, StatsArgs{}, false, with_bias);
    launch_logits({product, StatsArgs{{.stats = slots.view}}}, nullptr);
    const auto stats = slots.join();
    for (int64_t i = 0; i < shape.rows; ++i) {
      if (i == 5) {
        EXPECT_TRUE(std::isnan(stats[i].sum_exp));
      } else if (with_bias) {
        EXPECT_EQ(stats[i].max, -INFINITY) << i;
        EXPECT_EQ(stats[i].sum_exp, 0) << i;
        EXPECT_EQ(stats[i].sum_offset, 0) << i;
        EXPECT_EQ(stats[i].sum_sq, 0) << i;
        EXPECT_EQ(stats[i].logit_sum, -INFINITY) << i;
        EXPECT_EQ(stats[i].argmax, kColumnOffset) << i;
      } else {
        EXPECT_TRUE(std::isfinite(stats[i].sum_exp)) << i;
      }
    }
  }
}

// What bf16 is spaced by below 2^-126, in the units of exps that are stored times 2^kKeptExponent.
constexpr double kSubnormal = 0x1p-75;
static_assert(-133 - kKeptExponent == -75);

void run_exps(Shape shape, bool general, int64_t rows) {
  Problem problem(shape, DType::kBF16);
  const Options options = make_options(shape, general, DType::kBF16);
  const std::vector<int32_t> targets = make_targets(shape, true);
  for (int64_t i = 0; i < shape.rows; ++i) {
    if (targets[i] == kIgnoredRow) problem.hidden_bits[i * problem.stride] = from_float(NAN, DType::kBF16);
  }
  const std::vector<float> anchors = random_floats(shape.rows, 4.f, 5);
  const Guarded<uint16_t> hidden(problem.hidden_bits), classifier(problem.classifier_bits);
  const Guarded<float> anchor(anchors), bias(options.transform.bias);
  const Guarded<int32_t> target(targets), row_count(std::vector<int32_t>{static_cast<int32_t>(rows)});
  LogitsProduct product = make_product(problem, hidden, classifier, options);
  if (rows < shape.rows) product.row_count = row_count.get();
  if (general) product.transform.bias = bias.get();
  product.target = target.get();
  ExpsArgs args;
  args.anchor = anchor.get();
  const Guarded<float> target_logit(shape.rows);
  args.target_logit = target_logit.get();
  const Output out(shape);
  args.exps = out.all_columns();
  Slots slots(product, args, true, general);
  args.stats = slots.view;
  args.stats.max = nullptr;
  args.stats.argmax = nullptr;
  args.stats.weighted = nullptr;
  launch_logits({product, args}, nullptr);
  check_cuda(cudaDeviceSynchronize());
  const auto values = out.data.read();
  const auto sums = slots.sum.read(), target_logits = target_logit.read();
  const auto square_sums = slots.sum_sq.read(), logit_sums = slots.logit_sum.read();
  for (int64_t i = 0; i < shape.rows; ++i) {
    double sum = 0, relative = 0, squares = 0, logits = 0, logits_size = 0;
    for (int64_t j = 0; j < out.stride; ++j) {
      if (is_outside(out, values, shape, rows, i, j)) continue;
      const double value = std::ldexp(bf16_to_float(values[i * out.stride + j]), -kKeptExponent);
      if (targets[i] == kIgnoredRow) {
        ASSERT_EQ(value, 0) << "ignored row " << i;
        continue;
      }
      const double z = options.transform.logit(problem, i, j);
      const double error = options.transform.error(problem, i, j) + 0x1p-20;
      const double p = std::exp(z - anchors[i]);
      sum += p;
      squares += p * p;
      logits += z;
      logits_size += std::abs(z);
      relative = std::max(relative, error);
      const double slope_error =
          options.transform.softcap == 0 ? 0 : 2 * error / options.transform.softcap + 1e-5;
      ASSERT_NEAR(value, p * options.transform.slope(z), p * (0x1p-8 + 2 * error + slope_error) + kSubnormal)
          << i << ", " << j;
    }
    const int64_t y = targets[i] - kColumnOffset;
    if (i < rows && y >= 0 && y < shape.columns) {
      ASSERT_NEAR(target_logits[i], options.transform.logit(problem, i, y),
                  options.transform.error(problem, i, y))
          << "row " << i;
    } else {
      ASSERT_EQ(target_logits[i], untouched_float()) << "row " << i;
    }
    double got = 0;
    for (int64_t s = 0; s < slots.count; ++s) got += sums[s * slots.stride + i];
    if (i >= rows || targets[i] == kIgnoredRow) sum = squares = logits = logits_size = 0;
    ASSERT_NEAR(got, sum, sum * (2 * relative + 0x1p-17)) << "row " << i;
    if (!general) continue;
    double got_squares = 0, got_logits = 0;
    for (int64_t s = 0; s < slots.count; ++s) {
      got_squares += square_sums[s * slots.stride + i];
      got_logits += logit_sums[s * slots.stride + i];
    }
    ASSERT_NEAR(got_squares, squares, squares * (4 * relative + 0x1p-16)) << "row " << i;
    ASSERT_NEAR(got_logits, logits, shape.columns * relative + 0x1p-18 * logits_size) << "row " << i;
  }
  out.data.expect_guards();
  slots.sum.expect_guards();
  target_logit.expect_guards();
}

// The rounding of 1000 log2(e) is in every exponent of a row alike; sums are without it.
TEST_F(Logits, SumsOfLargeEqualLogits) {
  const Shape shape{3, 40, 8};
  Problem problem(shape, DType::kBF16);
  std::fill(problem.hidden_bits.begin(), problem.hidden_bits.end(), uint16_t{0});
  std::fill(problem.classifier_bits.begin(), problem.classifier_bits.end(), uint16_t{0});
  for (int64_t i = 0; i < shape.rows; ++i)
    problem.hidden_bits[i * problem.stride] = from_float(1000.f, DType::kBF16);
  for (int64_t j = 0; j < shape.columns; ++j)
    problem.classifier_bits[j * problem.stride] = from_float(1.f, DType::kBF16);
  const Guarded<uint16_t> hidden(problem.hidden_bits), classifier(problem.classifier_bits);
  LogitsProduct product = make_product(problem, hidden, classifier, Options{});
  product.transform.scale = 1;
  for (const bool everything : {false, true}) {
    Slots slots(product, StatsArgs{}, false, everything);
    launch_logits({product, StatsArgs{{.stats = slots.view}}}, nullptr);
    for (const RowStats<double>& row : slots.join()) {
      EXPECT_EQ(row.max, 1000);
      EXPECT_NEAR(row.sum_exp, 40, 40 * 1e-6);
    }
  }
}

TEST_P(Logits, ExpsPlain) {
  run_exps(GetParam(), false, GetParam().rows);
}
TEST_P(Logits, ExpsGeneral) {
  run_exps(GetParam(), true, GetParam().rows);
}
TEST_P(Logits, ExpsOfFewerRows) {
  for (const int64_t rows : {int64_t{0}, GetParam().rows / 2, GetParam().rows - 1})
    run_exps(GetParam(), false, rows);
}

INSTANTIATE_TEST_SUITE_P(Shapes, Logits, testing::ValuesIn(kShapes), name_of);

}  // namespace
}  // namespace logitless::cuda::sm90::test
