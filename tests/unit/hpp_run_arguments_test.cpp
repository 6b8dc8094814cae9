// What a run refuses: missing buffers, bad strides, targets out of range. Nothing is written then.
#include <gtest/gtest.h>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "c_calls.h"

namespace {

constexpr int64_t kTokens = 4, kVocab = 6, kHidden = 3;

// A complete run; outputs begin with a value that no result has.
struct Fixture {
  Fixture() {
    problem.pass = LOGITLESS_FORWARD_BACKWARD;
    problem.tokens = kTokens;
    problem.vocab = kVocab;
    problem.hidden = kHidden;
    problem.has.bias = problem.has.class_weight = problem.has.token_weight = problem.has.temperature = 1;
    problem.has.entropy = problem.has.argmax = 1;
    problem.label_smoothing = 0.1;
    problem.has.d_hidden = problem.has.d_classifier = problem.has.d_bias = 1;
    buffers.hidden = hidden.data();
    buffers.classifier = classifier.data();
    buffers.bias = bias.data();
    buffers.targets = targets.data();
    buffers.class_weight = class_weight.data();
    buffers.token_weight = token_weight.data();
    buffers.temperature = temperature.data();
    void** const statistics[] = {&buffers.max,
                                 &buffers.sum_exp,
                                 &buffers.target_logit,
                                 &buffers.sum_exp_logit,
                                 &buffers.weighted_logit_sum,
                                 &buffers.loss,
                                 &buffers.nll,
                                 &buffers.lse,
                                 &buffers.entropy};
    for (size_t i = 0; i < std::size(statistics); ++i) *statistics[i] = rows.data() + i * kTokens;
    buffers.argmax = counts.data();
    buffers.correct_count = counts.data() + kTokens;
    buffers.valid_count = counts.data() + kTokens + 1;
    buffers.d_hidden = d_hidden.data();
    buffers.d_classifier = d_classifier.data();
    buffers.d_bias = d_bias.data();
  }

  logitless_status run(const char* backend, void* stream = nullptr) {
    logitless_context_options options;
    logitless_context_options_init(&options);
    options.backend = backend;
    options.threads = 1;
    logitless_context* context = nullptr;
    logitless_plan* plan = nullptr;
    logitless_status status = logitless_context_create(&options, &context);
    if (status == LOGITLESS_OK) status = logitless_plan_create(context, &problem, &plan);
    if (status == LOGITLESS_OK) {
      logitless_plan_info info;
      logitless_plan_get_info(plan, &info);
      std::vector<char> memory(info.workspace_bytes + 64);
      char* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
      status = logitless_run(plan, &buffers, aligned, info.workspace_bytes, stream);
    }
    logitless_plan_destroy(plan);
    logitless_context_destroy(context);
    return status;
  }

  bool nothing_written() const {
    const std::vector<float> all[] = {rows, d_hidden, d_classifier, d_bias};
    for (const auto& each : all) {
      for (float value : each) {
        if (value != -777) return false;
      }
    }
    for (int64_t value : counts) {
      if (value != -777) return false;
    }
    return true;
  }

  logitless::Problem problem;
  logitless::Buffers buffers;
  std::vector<float> hidden = std::vector<float>(kTokens * kHidden, 0.5f);
  std::vector<float> classifier = std::vector<float>(kVocab * kHidden, 0.25f);
  std::vector<float> bias = std::vector<float>(kVocab, 1), class_weight = std::vector<float>(kVocab, 1);
  std::vector<float> token_weight = std::vector<float>(kTokens, 1);
  std::vector<float> temperature = std::vector<float>(kTokens, 1);
  std::vector<int64_t> targets = {0, 1, -100, 3};
  std::vector<float> rows = std::vector<float>(9 * kTokens, -777);
  std::vector<int64_t> counts = std::vector<int64_t>(kTokens + 2, -777);
  std::vector<float> d_hidden = std::vector<float>(kTokens * kHidden, -777);
  std::vector<float> d_classifier = std::vector<float>(kVocab * kHidden, -777);
  std::vector<float> d_bias = std::vector<float>(kVocab, -777);
};

class RunArguments : public testing::TestWithParam<const char*> {
 protected:
  void expect_refusal(Fixture& f, logitless_status status, const std::string& message) {
    EXPECT_EQ(f.run(GetParam()), status) << message;
    EXPECT_EQ(std::string(logitless_last_error()).substr(0, message.size()), message);
    EXPECT_TRUE(f.nothing_written()) << message;
  }
};

TEST_P(RunArguments, StreamsBelongToDevices) {
  Fixture f;
  EXPECT_EQ(f.run(GetParam(), &f), LOGITLESS_INVALID_ARGUMENT);
  EXPECT_STREQ(logitless_last_error(), "stream: expected null for buffers in host memory, got a pointer");
  EXPECT_TRUE(f.nothing_written());
}

TEST_P(RunArguments, TheFixtureIsValid) {
  Fixture f;
  EXPECT_EQ(f.run(GetParam()), LOGITLESS_OK) << logitless_last_error();
  for (float d : f.d_classifier) EXPECT_NE(d, -777);
}

TEST_P(RunArguments, TargetsOutOfRange) {
  for (int64_t bad : {kVocab, int64_t{-1}, INT64_MAX, INT64_MIN, int64_t{1} << 32}) {
    Fixture f;
    f.targets[3] = bad;
    expect_refusal(f, LOGITLESS_INVALID_TARGET,
                   "targets: expected 0 <= target < 6 or ignore_index -100, got " + std::to_string(bad) +
                       " at targets[3]");
  }
  Fixture f;
  const std::vector<int32_t> narrow = {0, 1, 2, INT32_MIN};
  f.problem.dtype.targets = LOGITLESS_I32;
  f.buffers.targets = narrow.data();
  expect_refusal(f, LOGITLESS_INVALID_TARGET, "targets: expected 0 <= target < 6");
}

TEST_P(RunArguments, MissingBuffers) {
  using B = logitless::Buffers;
  const std::pair<const char*, std::function<void(B&)>> missing[] = {
      {"hidden", [](B& b) { b.hidden = nullptr; }},
      {"classifier", [](B& b) { b.classifier = nullptr; }},
      {"bias", [](B& b) { b.bias = nullptr; }},
      {"targets", [](B& b) { b.targets = nullptr; }},
      {"class_weight", [](B& b) { b.class_weight = nullptr; }},
      {"token_weight", [](B& b) { b.token_weight = nullptr; }},
      {"temperature", [](B& b) { b.temperature = nullptr; }},
      {"d_hidden", [](B& b) { b.d_hidden = nullptr; }},
      {"d_classifier", [](B& b) { b.d_classifier = nullptr; }},
      {"d_bias", [](B& b) { b.d_bias = nullptr; }},
      {"hidden.stride", [](B& b) { b.hidden_stride = kHidden - 1; }},
      {"hidden.stride", [](B& b) { b.hidden_stride = -kHidden; }},
      {"classifier.stride", [](B& b) { b.classifier_stride = 1; }},
      {"classifier.stride", [](B& b) { b.classifier_stride = INT64_MAX / 2; }},
      {"d_hidden.stride", [](B& b) { b.d_hidden_stride = 2; }},
      {"d_classifier.stride", [](B& b) { b.d_classifier_stride = INT64_MIN; }}};
  for (const auto& [argument, spoil] : missing) {
    Fixture f;
    spoil(f.buffers);
    expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, std::string(argument) + ": expected ");
  }
}

TEST_P(RunArguments, OutputsThatTheProblemDoesNotHave) {
  Fixture f;
  f.problem.has.entropy = 0;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "sum_exp_logit: expected null unless the plan has entropy");
  f.buffers.sum_exp_logit = nullptr;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "entropy: expected null unless the plan has it");
  f.buffers.entropy = nullptr;
  f.problem.label_smoothing = 0;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "weighted_logit_sum: expected null without label_smoothing");
  f.buffers.weighted_logit_sum = nullptr;
  f.buffers.top_log_probs = f.rows.data();
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "top_log_probs: expected null without top_k");
  f.buffers.top_log_probs = nullptr;
  f.problem.has.argmax = 0;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "argmax: expected null unless the plan has argmax");
  f.buffers.argmax = nullptr;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "correct_count: expected null unless the plan has argmax");
  f.buffers.correct_count = nullptr;
  const std::pair<const char*, void * logitless::Buffers::*> unwanted[] = {
      {"mean_logit: expected null unless the plan has it", &logitless::Buffers::mean_logit},
      {"logit_sum: expected null unless the plan has mean_logit", &logitless::Buffers::logit_sum},
      {"log_sum_sq_probs: expected null unless the plan has it", &logitless::Buffers::log_sum_sq_probs},
      {"sum_sq_exp: expected null unless the plan has log_sum_sq_probs", &logitless::Buffers::sum_sq_exp}};
  for (const auto& [message, member] : unwanted) {
    f.buffers.*member = f.rows.data();
    expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, message);
    f.buffers.*member = nullptr;
  }
  uint8_t is_top1[kTokens];
  f.buffers.is_top1 = is_top1;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "is_top1: expected null unless the plan has argmax");
  f.buffers.is_top1 = nullptr;
  EXPECT_EQ(f.run(GetParam()), LOGITLESS_OK) << logitless_last_error();
}

TEST_P(RunArguments, SeveralTargetsARow) {
  Fixture f;
  std::vector<float> pairs(2 * kTokens, 0.5f), log_probs(2 * kTokens, -777);
  f.buffers.target_weight = pairs.data();
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "target_weight: expected null without targets_per_row");
  f.buffers.target_weight = nullptr;
  f.buffers.target_log_probs = log_probs.data();
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "target_log_probs: expected null unless targets_per_row");
  f.buffers.target_weight = pairs.data();
  f.problem.targets_per_row = 2;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "class_weight: expected none with targets_per_row");
  f.problem.has.class_weight = 0;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "class_weight: expected null unless the plan has it");
  f.buffers.class_weight = nullptr;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT,
                 "correct_count: expected null unless the plan has argmax, and with targets_per_row");
  f.buffers.correct_count = nullptr;
  std::vector<int64_t> targets = {0, 1, -100, -100, -100, 3, 4, kVocab};
  f.buffers.targets = targets.data();
  expect_refusal(f, LOGITLESS_INVALID_TARGET,
                 "targets: expected 0 <= target < 6 or ignore_index -100, got 6 at targets[3, 1]");
  EXPECT_EQ(log_probs, std::vector<float>(2 * kTokens, -777));
  targets.back() = 5;
  EXPECT_EQ(f.run(GetParam()), LOGITLESS_OK) << logitless_last_error();
  // All logits are alike, of six columns.
  const float log_p = -std::log(6.0f);
  for (const size_t i : {0, 1, 5, 6, 7}) EXPECT_NEAR(log_probs[i], log_p, 1e-6) << i;
  for (const size_t i : {2, 3, 4}) EXPECT_EQ(log_probs[i], 0) << i;
}

TEST_P(RunArguments, WhatABackwardPassNeeds) {
  Fixture f;
  f.problem.pass = LOGITLESS_BACKWARD;
  f.buffers.lse = nullptr;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "lse: expected a pointer");
  std::vector<float> lse(kTokens, 2);
  f.buffers.lse = lse.data();
  f.problem.has.grad_entropy = 1;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "grad_entropy: expected a pointer");
  f.buffers.grad_entropy = lse.data();
  f.buffers.entropy = nullptr;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "entropy: expected a pointer");
  f.problem.has.grad_entropy = 0;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "grad_entropy: expected null unless the plan has it");
  f.buffers.grad_entropy = nullptr;
  f.problem.reduction = LOGITLESS_REDUCTION_NONE;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "grad_loss: expected a pointer");
}

TEST_P(RunArguments, WhatAShardNeeds) {
  Fixture f;
  logitless::Problem& p = f.problem;
  p.pass = LOGITLESS_FORWARD;
  p.has.d_hidden = p.has.d_classifier = p.has.d_bias = 0;
  p.vocab_start = 2;
  p.vocab_total = kVocab + 4;
  std::vector<float> class_weight(kVocab + 4, 1);
  f.buffers.class_weight = class_weight.data();
  f.buffers.d_hidden = f.buffers.d_classifier = f.buffers.d_bias = nullptr;
  expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, "loss: expected null for a shard");
  f.buffers.loss = f.buffers.nll = f.buffers.lse = f.buffers.entropy = nullptr;
  f.buffers.correct_count = nullptr;
  const std::pair<const char*, void * logitless::Buffers::*> needed[] = {
      {"max", &logitless::Buffers::max},
      {"sum_exp", &logitless::Buffers::sum_exp},
      {"target_logit", &logitless::Buffers::target_logit},
      {"sum_exp_logit", &logitless::Buffers::sum_exp_logit},
      {"weighted_logit_sum", &logitless::Buffers::weighted_logit_sum}};
  for (const auto& [argument, member] : needed) {
    void* const kept = f.buffers.*member;
    f.buffers.*member = nullptr;
    expect_refusal(f, LOGITLESS_INVALID_ARGUMENT, std::string(argument) + ": expected a pointer");
    f.buffers.*member = kept;
  }
  EXPECT_EQ(f.run(GetParam()), LOGITLESS_OK) << logitless_last_error();
}

std::vector<const char*> usable_backends() {
  std::vector<const char*> out;
  for (int32_t i = 0; i < logitless_backend_count(); ++i) {
    char why[256] = "";
    logitless_backend_info(i, nullptr, 0, why, sizeof why);
    if (why[0] == '\0') out.push_back(logitless_backend_name(i));
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Backends, RunArguments, testing::ValuesIn(usable_backends()),
                         [](const auto& parameter) { return std::string(parameter.param); });

}  // namespace
