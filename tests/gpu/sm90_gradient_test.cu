// dz of the fused kernel against double precision, and exps of chosen blocks of rows only.
#include "sm90_fixture.cuh"

namespace logitless::cuda::sm90::test {
namespace {

struct Coefficients {
  explicit Coefficients(int64_t rows)
      : lse(random_floats(rows, 2.f, 21)),
        lse_low(random_floats(rows, 0.1f, 26)),
        a(random_floats(rows, 1.f, 22)),
        b(random_floats(rows, 1.f, 23)),
        c(random_floats(rows, 1.f, 24)),
        g(random_floats(rows, 1.f, 25)) {}
  std::vector<float> lse, lse_low, a, b, c, g;
};

class Gradients : public Logits {};

// weights: class weights beside c, else ones.
void run_gradient(Shape shape, DType dtype, bool general, bool weights, int64_t rows) {
  Problem problem(shape, dtype);
  const Options options = make_options(shape, general, dtype);
  const std::vector<int32_t> targets = make_targets(shape, true);
  for (int64_t i = 0; i < shape.rows; ++i) {
    if (targets[i] == kIgnoredRow) problem.hidden_bits[i * problem.stride] = from_float(NAN, dtype);
  }
  const Coefficients row(shape.rows);
  const Guarded<uint16_t> hidden(problem.hidden_bits), classifier(problem.classifier_bits);
  const Guarded<float> lse(row.lse), lse_low(row.lse_low), a(row.a), b(row.b), c(row.c), g(row.g);
  const Guarded<float> bias(options.transform.bias), class_weight(options.class_weight);
  const Guarded<float> scale(std::vector<float>{0.5f});
  const Guarded<int32_t> target(targets), row_count(std::vector<int32_t>{static_cast<int32_t>(rows)});
  LogitsProduct product = make_product(problem, hidden, classifier, options);
  if (rows < shape.rows) product.row_count = row_count.get();
  product.target = target.get();
  GradientArgs args;
  args.lse = lse.get();
  args.lse_low = lse_low.get();
  args.a = a.get();
  args.g = g.get();
  args.factor = scale.get();
  if (general) {
    product.transform.bias = bias.get();
    args.b = b.get();
    args.c = c.get();
    if (weights) args.class_weight = class_weight.get();
  }
  const Output out(shape);
  args.dz = out.all_columns();
  launch_logits({product, args}, nullptr);
  check_cuda(cudaDeviceSynchronize());
  const auto values = out.data.read();
  const double unit = dtype == DType::kBF16 ? 0x1p-8 : 0x1p-11;
  for (int64_t i = 0; i < shape.rows; ++i) {
    for (int64_t j = 0; j < out.stride; ++j) {
      if (is_outside(out, values, shape, rows, i, j)) continue;
      const double value = to_float(values[i * out.stride + j], dtype);
      if (targets[i] == kIgnoredRow) {
        ASSERT_EQ(value, 0) << "ignored row " << i;
        continue;
      }
      const double z = options.transform.logit(problem, i, j);
      const double log_p = z - row.lse[i] - row.lse_low[i];
      const double error = options.transform.error(problem, i, j) + 0x1p-20 * (1 + std::abs(log_p));
      const double slope = options.transform.slope(z);
      const double slope_error =
          options.transform.softcap == 0 ? 0 : 2 * error / options.transform.softcap + 1e-5;
      const double p = std::exp(log_p);
      double factor = row.a[i], constant = 0, sizes = std::abs(row.a[i]), factor_error = 0;
      if (general) {
        factor += row.b[i] * log_p;
        sizes += std::abs(row.b[i] * log_p);
        factor_error = std::abs(row.b[i]) * error;
        constant = row.c[i] * (weights ? options.class_weight[j] : 1);
      }
      if (targets[i] - kColumnOffset == j) constant -= row.g[i];
      const double exact = 0.5 * (p * factor + constant) * slope;
      const double size = p * sizes + std::abs(constant);
      const double bound = 0.5 * (p * (sizes * 2 * error + factor_error) + size * (slope_error + 0x1p-20)) +
                           unit * std::abs(exact) + (dtype == DType::kF16 ? 0x1p-24 : 1e-37);
      if (dtype == DType::kF16 && std::abs(exact) + bound > 65504) continue;  // infinite, or nearly so
      ASSERT_NEAR(value, exact, bound) << i << ", " << j;
    }
  }
  out.data.expect_guards();
}

TEST_P(Gradients, GradientPlain) {
  run_gradient(GetParam(), DType::kBF16, false, false, GetParam().rows);
}
TEST_P(Gradients, GradientGeneral) {
  run_gradient(GetParam(), DType::kBF16, true, false, GetParam().rows);
}
TEST_P(Gradients, GradientWithClassWeights) {
  run_gradient(GetParam(), DType::kBF16, true, true, GetParam().rows);
}
TEST_P(Gradients, GradientHalf) {
  run_gradient(GetParam(), DType::kF16, false, false, GetParam().rows);
  run_gradient(GetParam(), DType::kF16, true, true, GetParam().rows);
}
TEST_P(Gradients, GradientOfFewerRows) {
  for (const int64_t rows : {int64_t{0}, GetParam().rows / 2, GetParam().rows - 1}) {
    run_gradient(GetParam(), DType::kBF16, false, false, rows);
    run_gradient(GetParam(), DType::kBF16, true, true, rows);
  }
}

// Only the first columns' exps are stored, with the bits of a run that stores all, and so are the sums of all
// columns.
TEST_F(Gradients, ExpsOfTheFirstColumns) {
  const Shape shape{700, 2011, 72};
  const Problem problem(shape, DType::kBF16);
  const Guarded<uint16_t> hidden(problem.hidden_bits), classifier(problem.classifier_bits);
  const Guarded<float> anchor(std::vector<float>(shape.rows, 1.f));
  LogitsProduct product = make_product(problem, hidden, classifier, Options{});
  ExpsArgs args;
  args.anchor = anchor.get();
  const int slots = plan_logits({product, args}, processors(), true).slots;
  Guarded<float> sums(slots * shape.rows);
  args.stats = {.slots = slots, .stride = shape.rows, .sum = sums.get()};
  const auto run = [&](const Output& out, int64_t columns) {
    sums.write(std::vector<float>(slots * shape.rows, 0.f));
    args.exps = out.first_columns(columns);
    launch_logits({product, args}, nullptr);
    check_cuda(cudaDeviceSynchronize());
    out.data.expect_guards();
    return sums.read();
  };
  const Output all(shape);
  const auto all_sums = run(all, shape.columns);
  const auto expected = all.data.read();
  for (const int64_t columns : {int64_t{0}, int64_t{192}, int64_t{960}, int64_t{1928}}) {
    const Output some(shape);
    const auto untouched = some.data.read();
    EXPECT_EQ(run(some, columns), all_sums) << columns;
    const auto got = some.data.read();
    for (int64_t i = 0; i < shape.rows; ++i) {
      for (int64_t j = 0; j < shape.columns; ++j) {
        const int64_t at = i * some.stride + j;
        ASSERT_EQ(got[at], j < columns ? expected[at] : untouched[at]) << columns << ": " << i << ", " << j;
      }
    }
  }
}

// Blocks of rows that are off keep their exps and sums; the others get the bits of a run over all.
TEST_F(Gradients, ExpsOfActiveBlocks) {
  const Shape shape{1500, 3000, 72};
  const Problem problem(shape, DType::kBF16);
  const Guarded<uint16_t> hidden(problem.hidden_bits), classifier(problem.classifier_bits);
  const Guarded<float> anchor(std::vector<float>(shape.rows, 1.f));
  const std::vector<uint8_t> flags = {0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0};
  const Guarded<uint8_t> active(flags);
  const Output all(shape), some(shape);
  LogitsProduct product = make_product(problem, hidden, classifier, Options{});
  ExpsArgs args;
  args.anchor = anchor.get();
  const int slots = plan_logits({product, args}, processors(), true).slots;
  Guarded<float> sums(slots * shape.rows);
  args.stats = {.slots = slots, .stride = shape.rows, .sum = sums.get()};
  std::vector<float> joined[2];
  for (int run = 0; run < 2; ++run) {
    sums.write(std::vector<float>(slots * shape.rows, 0.f));
    product.row_block_active = run == 0 ? nullptr : active.get();
    args.exps = (run == 0 ? all : some).all_columns();
    launch_logits({product, args}, nullptr);
    check_cuda(cudaDeviceSynchronize());
    const auto parts = sums.read();
    joined[run].assign(shape.rows, 0.f);
    for (int64_t s = 0; s < slots; ++s) {
      for (int64_t i = 0; i < shape.rows; ++i) joined[run][i] += parts[s * shape.rows + i];
    }
  }
  const auto expected = all.data.read(), got = some.data.read();
  for (int64_t i = 0; i < shape.rows; ++i) {
    const bool on = flags[i / 128] != 0;
    if (on) {
      ASSERT_NEAR(joined[1][i], joined[0][i], 0x1p-18 * joined[0][i]) << i;
    } else {
      ASSERT_EQ(joined[1][i], 0.f) << i;
    }
    for (int64_t j = 0; j < shape.columns; ++j) {
      ASSERT_EQ(got[i * some.stride + j], on ? expected[i * all.stride + j] : kUntouched) << i << ", " << j;
    }
  }
  some.data.expect_guards();
  sums.expect_guards();
}

INSTANTIATE_TEST_SUITE_P(Shapes, Gradients, testing::ValuesIn(kShapes), name_of);

}  // namespace
}  // namespace logitless::cuda::sm90::test
