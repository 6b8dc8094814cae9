// The body's gradients against finite differences, and its pieces on small cases done by hand.

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "train/adamw.h"
#include "train/model.h"
#include "train/random.h"
#include "train/schedule.h"

namespace logitless::train {
namespace {

constexpr int64_t kBatch = 2;
constexpr int64_t kLength = 7;

ModelConfig small_model() {
  return {.vocab = 11, .dim = 8, .inner = 12, .layers = 2};
}

// A fixed linear function of the hidden states stands for the head: loss = sum_k w_k * hidden_k.
std::vector<float> head_weights(size_t count) {
  Random random(99);
  std::vector<float> weights(count);
  for (float& w : weights) w = static_cast<float>(random.normal());
  return weights;
}

double loss_of(Model& model, const std::vector<int32_t>& tokens, const std::vector<float>& weights) {
  const std::span<const float> hidden = model.forward(tokens, kBatch, kLength);
  double loss = 0.0;
  for (size_t k = 0; k < hidden.size(); ++k) loss += static_cast<double>(hidden[k]) * weights[k];
  return loss;
}

std::vector<int32_t> some_tokens(int64_t vocab) {
  Random random(3);
  std::vector<int32_t> tokens(kBatch * kLength);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.below(vocab));
  return tokens;
}

// Along a random direction d of one parameter: (L(p + s d) - L(p - s d)) / 2s against g . d. The truncation
// error falls as s^2, the rounding error grows as 1 / s; both are measured, not guessed: the first by a step
// twice as long (Richardson: error about a third of the change), the second by fp32's unit and the loss's
// terms.
TEST(TrainModel, GradientsAgreeWithFiniteDifferences) {
  Model model(small_model(), 5);
  // Norm gains and biases away from their initial values, so that no gradient is special.
  Random random(7);
  for (Parameter& p : model.parameters()) {
    if (!p.decays) {
      for (float& x : p.value) x += static_cast<float>(0.2 * random.normal());
    }
  }
  const std::vector<int32_t> tokens = some_tokens(model.config().vocab);
  const std::vector<float> weights = head_weights(static_cast<size_t>(kBatch * kLength * model.config().dim));
  const std::span<const float> hidden = model.forward(tokens, kBatch, kLength);
  double terms = 0.0;
  for (size_t k = 0; k < hidden.size(); ++k) terms += std::abs(static_cast<double>(hidden[k]) * weights[k]);
  model.backward(weights);

  for (Parameter& p : model.parameters()) {
    if (p.name == "lm_head.weight") continue;  // the head's own gradient is not the body's work
    for (int trial = 0; trial < 4; ++trial) {
      const std::vector<float> before = p.value;
      std::vector<float> direction(before.size());
      double expected = 0.0;
      for (size_t i = 0; i < direction.size(); ++i) {
        direction[i] = static_cast<float>(random.normal() / std::sqrt(static_cast<double>(direction.size())));
        expected += static_cast<double>(p.gradient[i]) * direction[i];
      }
      const auto slope = [&](float s) {
        for (size_t i = 0; i < before.size(); ++i) p.value[i] = before[i] + s * direction[i];
        const double up = loss_of(model, tokens, weights);
        for (size_t i = 0; i < before.size(); ++i) p.value[i] = before[i] - s * direction[i];
        const double down = loss_of(model, tokens, weights);
        p.value = before;
        return (up - down) / (2.0 * static_cast<double>(s));
      };
      constexpr float kStep = 0.02F;
      const double fine = slope(kStep);
      const double coarse = slope(2 * kStep);
      const double truncation = std::abs(coarse - fine);
      // Each hidden value comes out of about twenty roundings in a row of two layers.
      const double rounding = 20 * 0x1.0p-24 * terms / static_cast<double>(kStep);
      EXPECT_NEAR(fine, expected, truncation + rounding) << p.name << " trial " << trial;
      // The check means something only if the allowance is small beside the gradient.
      double norm = 0.0;
      for (const float g : p.gradient) norm += static_cast<double>(g) * g;
      EXPECT_LT(rounding, 0.05 * std::sqrt(norm)) << p.name;
    }
  }
}

TEST(TrainModel, LaterTokensDoNotChangeEarlierHiddenStates) {
  Model model(small_model(), 5);
  std::vector<int32_t> tokens = some_tokens(model.config().vocab);
  const std::span<const float> first = model.forward(tokens, kBatch, kLength);
  const std::vector<float> before(first.begin(), first.end());
  constexpr int64_t kChanged = 4;
  tokens[kChanged] = (tokens[kChanged] + 1) % 11;
  const std::span<const float> after = model.forward(tokens, kBatch, kLength);
  const auto dim = static_cast<size_t>(model.config().dim);
  for (size_t k = 0; k < before.size(); ++k) {
    const size_t row = k / dim;
    if (row < kChanged || row >= kLength) {
      EXPECT_EQ(before[k], after[k]) << "row " << row;
    }
  }
  EXPECT_NE(before[kChanged * dim], after[kChanged * dim]);
  EXPECT_NE(before[(kLength - 1) * dim], after[(kLength - 1) * dim]);  // the state carries it on
}

TEST(TrainModel, RefusesTokensOutsideTheVocabulary) {
  Model model(small_model(), 5);
  std::vector<int32_t> tokens(kBatch * kLength, 0);
  tokens[3] = 11;
  EXPECT_THROW(model.forward(tokens, kBatch, kLength), std::invalid_argument);
  tokens[3] = -1;
  EXPECT_THROW(model.forward(tokens, kBatch, kLength), std::invalid_argument);
  EXPECT_THROW(model.forward(std::vector<int32_t>(3), kBatch, kLength), std::invalid_argument);
}

// Two steps of AdamW in double precision from the formulas of the paper.
TEST(TrainAdamW, FollowsTheFormulas) {
  std::vector<Parameter> parameters;
  parameters.emplace_back("decays", std::vector<int64_t>{2}, true);
  parameters.emplace_back("does not", std::vector<int64_t>{1}, false);
  parameters[0].value = {1.0F, -2.0F};
  parameters[1].value = {3.0F};
  const AdamWConfig config{.beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8, .weight_decay = 0.1};
  AdamW optimizer(config, parameters);
  const double gradients[2][3] = {{0.5, -0.25, 2.0}, {-1.0, 0.75, 0.0}};
  double value[3] = {1.0, -2.0, 3.0};
  double m[3] = {};
  double v[3] = {};
  constexpr double kRate = 0.01;
  for (int step = 1; step <= 2; ++step) {
    for (int i = 0; i < 3; ++i) {
      const double g = gradients[step - 1][i];
      parameters[i < 2 ? 0 : 1].gradient[static_cast<size_t>(i < 2 ? i : 0)] = static_cast<float>(g);
      m[i] = 0.9 * m[i] + 0.1 * g;
      v[i] = 0.99 * v[i] + 0.01 * g * g;
      const double update =
          m[i] / (1 - std::pow(0.9, step)) / (std::sqrt(v[i] / (1 - std::pow(0.99, step))) + 1e-8);
      if (i < 2) value[i] -= kRate * 0.1 * value[i];
      value[i] -= kRate * update;
    }
    optimizer.step(parameters, kRate);
  }
  // The update is below 2 * rate; a few roundings of it and of the value.
  const double tolerance = 4 * 0x1.0p-24 * (3.0 + 8 * 2 * kRate);
  EXPECT_NEAR(parameters[0].value[0], value[0], tolerance);
  EXPECT_NEAR(parameters[0].value[1], value[1], tolerance);
  EXPECT_NEAR(parameters[1].value[0], value[2], tolerance);
}

TEST(TrainSchedule, WarmsUpThenFallsToATenth) {
  Schedule schedule{.peak = 1.0, .warmup = 10, .decay_from = 20, .total = 0};
  EXPECT_DOUBLE_EQ(schedule.learning_rate(0), 0.1);
  EXPECT_DOUBLE_EQ(schedule.learning_rate(9), 1.0);
  EXPECT_DOUBLE_EQ(schedule.learning_rate(15), 1.0);
  const double before = schedule.learning_rate(20);
  schedule.total = 120;
  EXPECT_DOUBLE_EQ(schedule.learning_rate(20), before);  // the past does not depend on the total
  EXPECT_NEAR(schedule.learning_rate(70), 0.55, 1e-12);
  EXPECT_NEAR(schedule.learning_rate(120), 0.1, 1e-12);
  EXPECT_NEAR(schedule.learning_rate(500), 0.1, 1e-12);
}

}  // namespace
}  // namespace logitless::train
