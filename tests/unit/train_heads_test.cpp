// The two heads against each other and against double precision, and the agreement that `train` demands.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "train/agreement.h"
#include "train/gemm.h"
#include "train/head.h"
#include "train/random.h"
#include "train/trainer.h"

namespace logitless::train {
namespace {

struct Case {
  int64_t tokens = 37;
  int64_t vocab = 301;
  int64_t dim = 24;
  std::vector<float> hidden;
  std::vector<float> classifier;
  std::vector<int32_t> targets;
  HeadInput input() const { return {hidden, classifier, targets, vocab, dim}; }
};

Case random_case() {
  Case c;
  Random random(11);
  c.hidden.resize(static_cast<size_t>(c.tokens * c.dim));
  c.classifier.resize(static_cast<size_t>(c.vocab * c.dim));
  for (float& x : c.hidden) x = static_cast<float>(random.normal());
  for (float& x : c.classifier) x = static_cast<float>(0.5 * random.normal());
  for (int64_t i = 0; i < c.tokens; ++i) c.targets.push_back(static_cast<int32_t>(random.below(c.vocab)));
  return c;
}

double exact_loss(const Case& c) {
  double total = 0.0;
  for (int64_t i = 0; i < c.tokens; ++i) {
    double sum = 0.0;
    double target = 0.0;
    for (int64_t j = 0; j < c.vocab; ++j) {
      double z = 0.0;
      for (int64_t d = 0; d < c.dim; ++d) {
        z += static_cast<double>(c.hidden[static_cast<size_t>(i * c.dim + d)]) *
             static_cast<double>(c.classifier[static_cast<size_t>(j * c.dim + d)]);
      }
      sum += std::exp(z);
      if (j == c.targets[static_cast<size_t>(i)]) target = z;
    }
    total += std::log(sum) - target;
  }
  return total / static_cast<double>(c.tokens);
}

double logit_bound(const Case& c) {
  const auto largest = [&](const std::vector<float>& rows) {
    double most = 0.0;
    for (size_t at = 0; at < rows.size(); at += static_cast<size_t>(c.dim)) {
      double square = 0.0;
      for (int64_t d = 0; d < c.dim; ++d)
        square += std::pow(static_cast<double>(rows[at + static_cast<size_t>(d)]), 2);
      most = std::max(most, square);
    }
    return std::sqrt(most);
  };
  return largest(c.hidden) * largest(c.classifier);
}

TEST(TrainHeads, AgreeWithEachOtherAndWithDoublePrecision) {
  const Case c = random_case();
  const HeadSize size{c.tokens, c.vocab, c.dim};
  const auto materialized = make_materialized_head();
  const auto fused = make_fused_head(Context(), 1 << 20);
  std::vector<float> d_hidden[2];
  std::vector<float> d_classifier[2];
  int k = 0;
  const double exact = exact_loss(c);
  for (Head* head : {materialized.get(), fused.get()}) {
    d_hidden[k].resize(c.hidden.size());
    d_classifier[k].resize(c.classifier.size());
    const double loss = head->loss_and_gradients(c.input(), d_hidden[k], d_classifier[k]);
    EXPECT_NEAR(loss, exact, loss_tolerance(size, exact, logit_bound(c))) << head->name();
    EXPECT_NEAR(head->loss(c.input()), exact, loss_tolerance(size, exact, logit_bound(c))) << head->name();
    ++k;
  }
  const double tolerance = gradient_tolerance(size, logit_bound(c));
  EXPECT_LE(relative_difference(d_hidden[1], d_hidden[0]), tolerance);
  EXPECT_LE(relative_difference(d_classifier[1], d_classifier[0]), tolerance);
  EXPECT_EQ(materialized->workspace_bytes(), c.tokens * (c.vocab * 4 + 8));
  EXPECT_LE(fused->workspace_bytes(), 1 << 20);
}

// A head that leaves out the small softmax elements: the approximation that the comparison must not accept.
class FilteringHead : public Head {
 public:
  std::string name() const override { return "filtering"; }
  std::string description() const override { return {}; }
  double loss(const HeadInput& input) override { return exact_->loss(input); }
  int64_t workspace_bytes() const override { return 0; }
  double loss_and_gradients(const HeadInput& input, std::span<float> d_hidden,
                            std::span<float> d_classifier) override {
    const double loss = exact_->loss_and_gradients(input, d_hidden, d_classifier);
    const int64_t tokens = input.tokens();
    std::vector<float> z(static_cast<size_t>(tokens * input.vocab));
    gemm(Op::kNone, Op::kTranspose, tokens, input.vocab, input.dim, input.hidden.data(), input.dim,
         input.classifier.data(), input.dim, 0.0F, z.data(), input.vocab);
    for (int64_t i = 0; i < tokens; ++i) {
      float* row = z.data() + i * input.vocab;
      double sum = 0.0;
      for (int64_t j = 0; j < input.vocab; ++j) sum += std::exp(static_cast<double>(row[j]));
      for (int64_t j = 0; j < input.vocab; ++j) {
        double p = std::exp(static_cast<double>(row[j])) / sum;
        if (p < 0x1.0p-8) p = 0.0;
        if (j == input.targets[static_cast<size_t>(i)]) p -= 1.0;
        row[j] = static_cast<float>(p / static_cast<double>(tokens));
      }
    }
    gemm(Op::kTranspose, Op::kNone, input.vocab, input.dim, tokens, z.data(), input.vocab,
         input.hidden.data(), input.dim, 0.0F, d_classifier.data(), input.dim);
    return loss;
  }

 private:
  std::unique_ptr<Head> exact_ = make_materialized_head();
};

std::vector<int32_t> periodic_text() {
  Random random(4);
  std::vector<int32_t> text;
  for (int k = 0; k < 4000; ++k)
    text.push_back(static_cast<int32_t>(random.below(4) == 0 ? random.below(300) : k % 17));
  return text;
}

struct Curve {
  std::vector<double> loss;
  std::vector<StepBounds> bounds;
};

Curve train_with(std::unique_ptr<Head> head) {
  const std::vector<int32_t> text = periodic_text();
  TrainerConfig config;
  config.model = {.vocab = 300, .dim = 16, .inner = 24, .layers = 2};
  config.batch = {4, 16};
  Trainer trainer(config, text, text, make_host_network(config, std::move(head)));
  Curve curve;
  for (int k = 0; k < 8; ++k) {
    const double rate = 3e-3 * (k + 1) / 8;
    const StepResult step = trainer.step(rate, true);
    curve.loss.push_back(step.loss);
    curve.bounds.push_back({step.loss, rate, step.gradient_norm, step.logit_bound});
  }
  return curve;
}

Agreement compare(const Curve& curve, const Curve& reference) {
  Agreement agreement;
  agreement.tolerance = curve_tolerances({64, 300, 16}, reference.bounds);
  for (size_t k = 0; k < curve.loss.size(); ++k) {
    agreement.difference.push_back(std::abs(curve.loss[k] - reference.loss[k]));
  }
  return agreement;
}

TEST(TrainHeads, TrainTheSameModelWithinTheTolerance) {
  const Curve reference = train_with(make_materialized_head());
  EXPECT_LT(reference.loss.back(), reference.loss.front());
  const Agreement agreement = compare(train_with(make_fused_head(Context(), 1 << 20)), reference);
  EXPECT_TRUE(agreement.holds()) << agreement.largest_difference() << " of " << agreement.tolerance.back();
}

TEST(TrainHeads, AFilteredGradientIsNoticed) {
  const Curve reference = train_with(make_materialized_head());
  const Agreement agreement = compare(train_with(std::make_unique<FilteringHead>()), reference);
  EXPECT_FALSE(agreement.holds()) << agreement.largest_difference() << " of " << agreement.tolerance.back();
}

TEST(TrainHeads, TrainingTwiceGivesTheSameBits) {
  const Curve first = train_with(make_materialized_head());
  const Curve second = train_with(make_materialized_head());
  EXPECT_EQ(first.loss, second.loss);
}

}  // namespace
}  // namespace logitless::train
