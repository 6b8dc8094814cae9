// Thinned gradients through logitless.hpp.
#include <gtest/gtest.h>

#include <cmath>
#include <logitless/logitless.hpp>
#include <span>
#include <string>
#include <vector>

namespace logitless {
namespace {

constexpr int64_t kTokens = 7, kVocab = 40, kHidden = 5;

struct Gradients {
  float loss = 0;
  std::vector<float> d_hidden = std::vector<float>(kTokens * kHidden);
  std::vector<float> d_classifier = std::vector<float>(kVocab * kHidden);
};

class HppThinned : public testing::Test {
 protected:
  HppThinned() {
    for (size_t i = 0; i < hidden_.size(); ++i) hidden_[i] = std::sin(static_cast<float>(3 * i + 1));
    for (size_t i = 0; i < classifier_.size(); ++i) classifier_[i] = std::cos(static_cast<float>(7 * i));
    for (size_t i = 0; i < targets_.size(); ++i) targets_[i] = static_cast<int32_t>(11 * i % kVocab);
  }

  Matrix<const float> hidden() const { return {hidden_.data(), kTokens, kHidden}; }
  Matrix<const float> classifier() const { return {classifier_.data(), kVocab, kHidden}; }

  Problem problem(Pass pass) const {
    Problem p = make_problem(pass, hidden(), classifier());
    p.dtype.targets = dtype_of<int32_t>();
    p.reduction = LOGITLESS_REDUCTION_SUM;
    p.has.d_hidden = p.has.d_classifier = pass == Pass::forward ? 0 : 1;
    return p;
  }
  Buffers buffers() const { return make_buffers(hidden(), classifier(), std::span<const int32_t>(targets_)); }

  Gradients solve(const Problem& p) const {
    Gradients out;
    Buffers b = buffers();
    b.loss = &out.loss;
    b.d_hidden = out.d_hidden.data();
    b.d_classifier = out.d_classifier.data();
    run_once(context_, p, b);
    return out;
  }

  Context context_;
  std::vector<float> hidden_ = std::vector<float>(kTokens * kHidden);
  std::vector<float> classifier_ = std::vector<float>(kVocab * kHidden);
  std::vector<int32_t> targets_ = std::vector<int32_t>(kTokens);
};

TEST_F(HppThinned, SetGradientIsWhatTheRunMakes) {
  Problem p = problem(Pass::forward_backward);
  const Gradients exact = solve(p);
  set_gradient(p, Gradient::thinned, 1e-9);
  const Gradients close = solve(p);
  EXPECT_NEAR(close.loss, exact.loss, 1e-4);
  for (size_t i = 0; i < exact.d_hidden.size(); ++i) EXPECT_NEAR(close.d_hidden[i], exact.d_hidden[i], 1e-5);
  set_gradient(p, Gradient::thinned, 0.25, 5);
  const Gradients first = solve(p), again = solve(p);
  EXPECT_EQ(first.d_hidden, again.d_hidden);
  EXPECT_EQ(first.d_classifier, again.d_classifier);
  EXPECT_NE(first.d_hidden, exact.d_hidden);
  set_gradient(p, Gradient::exact);
  EXPECT_EQ(solve(p).d_hidden, exact.d_hidden);
}

TEST_F(HppThinned, DrawsOfAForwardPassServeABackwardPass) {
  Problem both = problem(Pass::forward_backward);
  set_gradient(both, Gradient::thinned, 0.25, 9);
  const Gradients expected = solve(both);

  Problem p = problem(Pass::forward);
  set_gradient(p, Gradient::thinned, 0.25, 9);
  p.has.draws = 1;
  const Plan forward(context_, p);
  const Workspace draws(forward.info().draws_bytes);
  std::vector<float> lse(kTokens);
  Buffers b = buffers();
  b.lse = lse.data();
  b.draws = draws.bytes().data();
  forward.run(b, Workspace(forward.info().workspace_bytes).bytes());

  p = problem(Pass::backward);
  set_gradient(p, Gradient::thinned, 0.25, 9);
  p.has.draws = 1;
  Gradients out;
  b.d_hidden = out.d_hidden.data();
  b.d_classifier = out.d_classifier.data();
  run_once(context_, p, b);
  for (size_t i = 0; i < out.d_hidden.size(); ++i) {
    EXPECT_NEAR(out.d_hidden[i], expected.d_hidden[i], 1e-5);
  }
  for (size_t i = 0; i < out.d_classifier.size(); ++i) {
    EXPECT_NEAR(out.d_classifier[i], expected.d_classifier[i], 1e-5);
  }
}

TEST_F(HppThinned, ErrorsNameTheArgument) {
  Problem p = problem(Pass::forward_backward);
  set_gradient(p, Gradient::thinned, 2);
  try {
    solve(p);
    FAIL() << "a threshold of 2 was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), LOGITLESS_INVALID_ARGUMENT);
    EXPECT_EQ(error.argument, "threshold");
    EXPECT_EQ(error.expected, "a number in [0, 1]");
  }
}

}  // namespace
}  // namespace logitless
