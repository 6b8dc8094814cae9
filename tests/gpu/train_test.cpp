// The demonstration's network on a CUDA device beside the host's: the same start, the same batches.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <logitless/logitless.hpp>
#include <string>
#include <vector>

#include "engine.h"
#include "train/agreement.h"
#include "train/cuda/open.h"
#include "train/device.h"
#include "train/random.h"
#include "train/trainer.h"

namespace logitless::train {
namespace {

constexpr int64_t kBudget = int64_t{64} << 20;
constexpr int kSteps = 6;

// Rows and columns that no block of a kernel divides, and rows longer than a block is wide.
struct Shape {
  const char* name;
  ModelConfig model;
  BatchShape batch;
};
const Shape kShapes[] = {{"odd", {.vocab = 301, .dim = 21, .inner = 37, .layers = 2}, {3, 17}},
                         {"wide", {.vocab = 1030, .dim = 264, .inner = 72, .layers = 1}, {2, 33}}};

TrainerConfig config_of(const Shape& shape) {
  TrainerConfig config;
  config.model = shape.model;
  config.batch = shape.batch;
  return config;
}

// Some tokens many times, some never.
std::vector<int32_t> some_text(int64_t vocab) {
  Random random(4);
  std::vector<int32_t> text;
  for (int k = 0; k < 4000; ++k)
    text.push_back(static_cast<int32_t>(random.below(4) == 0 ? random.below(vocab) : k % 17));
  return text;
}

std::unique_ptr<Device> host() {
  return make_host_device();
}
std::unique_ptr<Device> gpu() {
  return make_cuda_device(0);
}

enum class Kind { kMaterialized, kFused };
std::unique_ptr<Head> head_of(Device& device, Kind kind, int ordinal) {
  if (kind == Kind::kMaterialized) return device.materialized_head();
  ContextOptions options;
  options.device = ordinal;
  return device.fused_head(Context(options), kBudget, {});
}

struct Course {
  std::vector<double> loss;
  std::vector<StepBounds> bounds;
  std::vector<Parameter> start;   // before the first step
  std::vector<Parameter> first;   // with the gradients of the first step
  double weight_sensitivity = 0;  // of the first loss: sum |g w|
  double validation = 0;
  std::vector<float> hidden, d_hidden;  // of the first step
};

Course train_on(Device& device, Kind kind, int ordinal, const Shape& shape) {
  const TrainerConfig config = config_of(shape);
  const std::vector<int32_t> text = some_text(config.model.vocab);
  Trainer trainer(config, text, text, device.network(config, head_of(device, kind, ordinal)));
  Course run;
  run.start = trainer.network().parameters();
  for (int k = 0; k < kSteps; ++k) {
    const double rate = 3e-3 * (k + 1) / kSteps;
    const StepResult step = trainer.step(rate, true);
    run.loss.push_back(step.loss);
    run.bounds.push_back({step.loss, rate, step.gradient_norm, step.logit_bound});
    if (k > 0) continue;
    run.first = trainer.network().parameters();
    const std::span<const float> hidden = trainer.network().hidden();
    run.hidden.assign(hidden.begin(), hidden.end());
    const std::span<const float> d_hidden = trainer.network().d_hidden();
    run.d_hidden.assign(d_hidden.begin(), d_hidden.end());
    for (size_t p = 0; p < run.start.size(); ++p) {
      for (size_t i = 0; i < run.start[p].value.size(); ++i) {
        run.weight_sensitivity += std::abs(static_cast<double>(run.first[p].gradient[i]) *
                                           static_cast<double>(run.start[p].value[i]));
      }
    }
  }
  run.validation = trainer.validate().loss;
  return run;
}

// A layer's products, their roundings among them, are exact products with weights that are changed by as
// much, relatively: a rounded sum of n terms is wrong by 6 sqrt(n) u of the sum of their magnitudes
// (agreement.h). The few roundings of what is done to each element between two products are less than that.
double product_error(const Shape& shape) {
  const auto terms = static_cast<double>(std::max(4 * shape.model.inner, shape.batch.tokens()));
  return 6.0 * std::sqrt(terms) * 0x1.0p-24;
}

class TrainOnDevice : public testing::TestWithParam<std::tuple<int, Kind>> {
 protected:
  void SetUp() override {
    if (logitless_test::device_engines().empty()) GTEST_SKIP() << logitless_test::why_no_device();
    if (const std::string why_not = why_no_cuda(); !why_not.empty()) GTEST_SKIP() << why_not;
  }
  const Shape& shape() const { return kShapes[std::get<0>(GetParam())]; }
  Kind kind() const { return std::get<1>(GetParam()); }
};

TEST_P(TrainOnDevice, ComputesWhatTheHostComputes) {
  const auto processors = host(), device = gpu();
  const Course expected = train_on(*processors, kind(), LOGITLESS_HOST_MEMORY, shape());
  const Course got = train_on(*device, kind(), 0, shape());
  const HeadSize size{shape().batch.tokens(), shape().model.vocab, shape().model.dim};

  // The first loss: the head's rounding, and that of the products below it, of either.
  const double body = 2 * product_error(shape()) * expected.weight_sensitivity;
  const double bound = expected.bounds[0].logit_bound;
  EXPECT_NEAR(got.loss[0], expected.loss[0], loss_tolerance(size, expected.loss[0], bound) + body);
  EXPECT_LT(body, 1e-3);

  // Gradients pass through three products a layer, forward and backward, and the head.
  const auto products = static_cast<double>(6 * shape().model.layers);
  const double gradient = gradient_tolerance(size, bound) + 2 * products * product_error(shape());
  EXPECT_LE(relative_difference(got.hidden, expected.hidden), gradient);
  EXPECT_LE(relative_difference(got.d_hidden, expected.d_hidden), gradient);
  ASSERT_EQ(got.first.size(), expected.first.size());
  for (size_t p = 0; p < got.first.size(); ++p) {
    EXPECT_EQ(got.first[p].name, expected.first[p].name);
    EXPECT_LE(relative_difference(got.first[p].gradient, expected.first[p].gradient), gradient)
        << got.first[p].name;
  }
  EXPECT_LT(gradient, 1e-2);

  // Later losses: AdamW turns a relative error of a gradient into one of its step (agreement.cpp).
  double drift = 0;
  for (size_t k = 0; k < got.loss.size(); ++k) {
    const StepBounds& step = expected.bounds[k];
    EXPECT_NEAR(got.loss[k], step.loss, loss_tolerance(size, step.loss, step.logit_bound) + body + drift)
        << "step " << k;
    drift += 2 * gradient * step.learning_rate * step.gradient_norm;
  }
  EXPECT_NEAR(got.validation, expected.validation,
              body + drift + loss_tolerance(size, expected.validation, bound));
  EXPECT_LT(got.loss.back(), got.loss.front());
}

// AdamW's first step is shrink * value - rate * g / (|g| + epsilon). In fp32 1 - beta is off by up to 10 u of
// itself, and about six more roundings make half of 32 u.
TEST_P(TrainOnDevice, UpdatesAsAdamWSays) {
  const auto device = gpu();
  const Course got = train_on(*device, kind(), 0, shape());
  const AdamWConfig config;
  const double rate = got.bounds[0].learning_rate;
  for (size_t p = 0; p < got.first.size(); ++p) {
    const double shrink = got.first[p].decays ? 1.0 - rate * config.weight_decay : 1.0;
    double worst = 0;  // of the tolerance
    for (size_t i = 0; i < got.first[p].value.size(); ++i) {
      const double g = got.first[p].gradient[i], before = got.start[p].value[i];
      const double expected = shrink * before - rate * g / (std::abs(g) + config.epsilon);
      const double tolerance = 0x1.0p-24 * (4 * std::abs(before) + 32 * rate);
      worst = std::max(worst, std::abs(got.first[p].value[i] - expected) / tolerance);
    }
    EXPECT_LE(worst, 1.0) << got.first[p].name;
  }
}

TEST_P(TrainOnDevice, GivesTheSameBitsTwice) {
  const auto device = gpu();
  const Course first = train_on(*device, kind(), 0, shape()), second = train_on(*device, kind(), 0, shape());
  EXPECT_EQ(first.loss, second.loss);
  EXPECT_EQ(first.validation, second.validation);
}

TEST_P(TrainOnDevice, CountsTheMemoryThatItHolds) {
  const auto device = gpu();
  const TrainerConfig config = config_of(shape());
  const std::vector<int32_t> text = some_text(config.model.vocab);
  device->reset_peak();
  const int64_t before = device->peak_bytes();
  int64_t parameters = 0;
  {
    Trainer trainer(config, text, text, device->network(config, head_of(*device, kind(), 0)));
    trainer.step(1e-3);
    parameters = parameter_count(trainer.network().parameters());
    const int64_t tokens = config.batch.tokens();
    const int64_t workspace = trainer.network().head().workspace_bytes();
    if (kind() == Kind::kMaterialized) {
      EXPECT_EQ(workspace, tokens * (config.model.vocab * 4 + 8));
    } else {
      const Matrix<const float> hidden{nullptr, tokens, config.model.dim};
      const Matrix<const float> classifier{nullptr, config.model.vocab, config.model.dim};
      ContextOptions options;
      options.device = 0;
      const Problem problem = head_problem(Pass::forward_backward, hidden, classifier, kBudget, {});
      EXPECT_EQ(workspace, static_cast<int64_t>(Plan(Context(options), problem).info().workspace_bytes));
    }
    // Values, gradients and two moments, beside the workspace.
    EXPECT_GE(device->peak_bytes(), before + workspace + 4 * parameters * 4);
  }
  device->reset_peak();
  EXPECT_EQ(device->peak_bytes(), before);
}

std::string name_of(const testing::TestParamInfo<TrainOnDevice::ParamType>& info) {
  return std::string(kShapes[std::get<0>(info.param)].name) +
         (std::get<1>(info.param) == Kind::kFused ? "Fused" : "Materialized");
}
INSTANTIATE_TEST_SUITE_P(Heads, TrainOnDevice,
                         testing::Combine(testing::Values(0, 1),
                                          testing::Values(Kind::kMaterialized, Kind::kFused)),
                         name_of);

}  // namespace
}  // namespace logitless::train
