// Refusals of runs: missing buffers, bad strides, targets out of range. Nothing is written then.
#include <gtest/gtest.h>
#include <functional>
#include <string>
#include <vector>

#include <logitless/logitless.hpp>

namespace {

constexpr int64_t kTokens = 4, kVocab = 6, kHidden = 3;

// A complete run. Outputs begin with a value that no result has.
struct Fixture {
  Fixture() {
    problem.pass = LOGITLESS_FORWARD_BACKWARD;
    problem.tokens = kTokens;
    problem.vocab = kVocab;
    problem.hidden = kHidden;
    problem.has.bias = problem.has.class_weight = problem.has.token_weight = problem.has.temperature = 1;
    problem.has.entropy = problem.has.argmax = 1;
    problem.label_smoothing = 0.1;
    problem.has.d_hidden = problem.has.d_weight = problem.has.d_bias = 1;
    buffers.hidden = hidden.data();
    buffers.weight = weight.data();
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
    buffers.d_weight = d_weight.data();
    buffers.d_bias = d_bias.data();
  }

  // Returns the refusal of a run on the backend; empty where it ran.
  std::string refusal(const char* backend, void* stream = nullptr) {
    logitless::ContextOptions options;
    options.backend = backend;
    options.threads = 1;
    status = LOGITLESS_OK;
    try {
      const logitless::Plan plan(logitless::Context(options), problem);
      const logitless::Workspace workspace(plan.info().workspace_bytes);
      plan.run(buffers, workspace.bytes(), stream);
    } catch (const logitless::Error& error) {
      status = error.status();
      return error.what();
    }
    return "";
  }

  bool nothing_written() const {
    const std::vector<float> all[] = {rows, d_hidden, d_weight, d_bias};
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

  // Turns the problem into a backward pass.
  void go_backward() {
    problem.pass = LOGITLESS_BACKWARD;
    problem.has.grad_entropy = 1;
    buffers.lse = buffers.entropy = more.data();
    buffers.grad_entropy = more.data();
  }
  // Turns the problem into the forward pass of a shard of columns [2, 8) of 10.
  void cut() {
    problem.pass = LOGITLESS_FORWARD;
    problem.has.d_hidden = problem.has.d_weight = problem.has.d_bias = 0;
    problem.vocab_start = 2;
    problem.vocab_total = kVocab + 4;
    buffers.class_weight = more.data();
    buffers.d_hidden = buffers.d_weight = buffers.d_bias = nullptr;
    buffers.loss = buffers.nll = buffers.lse = buffers.entropy = nullptr;
    buffers.correct_count = nullptr;
  }
  // Turns the problem into a forward pass that keeps its draw in `saved`.
  void keep_draw(void* saved) {
    problem.pass = LOGITLESS_FORWARD;
    problem.has.d_hidden = problem.has.d_weight = problem.has.d_bias = 0;
    buffers.d_hidden = buffers.d_weight = buffers.d_bias = nullptr;
    problem.gradient = LOGITLESS_ALWAYS_SPARSIFIED;
    problem.has.saved = 1;
    buffers.saved = saved;
  }
  // Turns the problem into a loss behind a screen whose rounded weight is kept.
  void keep_weight(void* screen_weight) {
    keep_draw(nullptr);
    problem.has.saved = 0;
    problem.has.entropy = problem.has.argmax = 0;
    problem.label_smoothing = 0;
    problem.screen = LOGITLESS_SCREEN_FP8;
    problem.has.screen_weight = 1;
    buffers = {.hidden = buffers.hidden,
               .weight = buffers.weight,
               .bias = buffers.bias,
               .targets = buffers.targets,
               .class_weight = buffers.class_weight,
               .token_weight = buffers.token_weight,
               .temperature = buffers.temperature,
               .screen_weight = screen_weight};
  }
  void give_two_targets() {
    problem.targets_per_row = 2;
    problem.has.class_weight = 0;
    buffers.class_weight = nullptr;
    buffers.correct_count = nullptr;
    buffers.targets = two_targets.data();
    buffers.target_weight = more.data();
  }

  logitless::Problem problem;
  logitless::Buffers buffers;
  logitless_status status = LOGITLESS_OK;
  std::vector<float> more = std::vector<float>(kVocab + 4, 1);
  std::vector<int64_t> two_targets = {0, 1, -100, -100, -100, 3, 4, 5};
  std::vector<int32_t> narrow_targets = {0, 1, 2, INT32_MIN};
  std::vector<float> hidden = std::vector<float>(kTokens * kHidden, 0.5f);
  std::vector<float> weight = std::vector<float>(kVocab * kHidden, 0.25f);
  std::vector<float> bias = std::vector<float>(kVocab, 1), class_weight = std::vector<float>(kVocab, 1);
  std::vector<float> token_weight = std::vector<float>(kTokens, 1);
  std::vector<float> temperature = std::vector<float>(kTokens, 1);
  std::vector<int64_t> targets = {0, 1, -100, 3};
  std::vector<float> rows = std::vector<float>(9 * kTokens, -777);
  std::vector<int64_t> counts = std::vector<int64_t>(kTokens + 2, -777);
  std::vector<float> d_hidden = std::vector<float>(kTokens * kHidden, -777);
  std::vector<float> d_weight = std::vector<float>(kVocab * kHidden, -777);
  std::vector<float> d_bias = std::vector<float>(kVocab, -777);
};

struct BadRun {
  const char* message;  // the refusal begins with it
  std::function<void(Fixture&)> spoil;
  logitless_status status = LOGITLESS_INVALID_ARGUMENT;
};

std::vector<BadRun> bad_runs() {
  using F = Fixture;
  std::vector<BadRun> runs = {
      {"saved: expected a pointer, got null", [](F& f) { f.keep_draw(nullptr); }},
      {"saved: expected 64-byte alignment", [](F& f) { f.keep_draw(reinterpret_cast<void*>(8)); }},
      {"screen_weight: expected a pointer, got null", [](F& f) { f.keep_weight(nullptr); }},
      {"screen_weight: expected 64-byte alignment", [](F& f) { f.keep_weight(reinterpret_cast<void*>(8)); }},
      {"screen_weight: expected null unless the plan has it",
       [](F& f) { f.buffers.screen_weight = f.rows.data(); }},
      {"hidden: expected ", [](F& f) { f.buffers.hidden = nullptr; }},
      {"weight: expected ", [](F& f) { f.buffers.weight = nullptr; }},
      {"bias: expected ", [](F& f) { f.buffers.bias = nullptr; }},
      {"targets: expected ", [](F& f) { f.buffers.targets = nullptr; }},
      {"class_weight: expected ", [](F& f) { f.buffers.class_weight = nullptr; }},
      {"token_weight: expected ", [](F& f) { f.buffers.token_weight = nullptr; }},
      {"temperature: expected ", [](F& f) { f.buffers.temperature = nullptr; }},
      {"d_hidden: expected ", [](F& f) { f.buffers.d_hidden = nullptr; }},
      {"d_weight: expected ", [](F& f) { f.buffers.d_weight = nullptr; }},
      {"d_bias: expected ", [](F& f) { f.buffers.d_bias = nullptr; }},
      {"hidden.stride: expected ", [](F& f) { f.buffers.hidden_stride = kHidden - 1; }},
      {"hidden.stride: expected ", [](F& f) { f.buffers.hidden_stride = -kHidden; }},
      {"weight.stride: expected ", [](F& f) { f.buffers.weight_stride = 1; }},
      {"weight.stride: expected ", [](F& f) { f.buffers.weight_stride = INT64_MAX / 2; }},
      {"d_hidden.stride: expected ", [](F& f) { f.buffers.d_hidden_stride = 2; }},
      {"d_weight.stride: expected ", [](F& f) { f.buffers.d_weight_stride = INT64_MIN; }},
      // Tensors that the plan does not have.
      {"sum_exp_logit: expected null unless the plan has entropy", [](F& f) { f.problem.has.entropy = 0; }},
      {"entropy: expected null unless the plan has it",
       [](F& f) { f.problem.has.entropy = 0, f.buffers.sum_exp_logit = nullptr; }},
      {"weighted_logit_sum: expected null without label_smoothing",
       [](F& f) { f.problem.label_smoothing = 0; }},
      {"top_log_probs: expected null without top_k", [](F& f) { f.buffers.top_log_probs = f.rows.data(); }},
      {"sampled_keys: expected null without num_samples",
       [](F& f) { f.buffers.sampled_keys = f.rows.data(); }},
      {"sample_seed: expected null without num_samples", [](F& f) { f.buffers.sample_seed = f.rows.data(); }},
      {"sample_mask: expected null unless the plan has it",
       [](F& f) { f.buffers.sample_mask = reinterpret_cast<int32_t*>(f.rows.data()); }},
      {"argmax: expected null unless the plan has argmax", [](F& f) { f.problem.has.argmax = 0; }},
      {"correct_count: expected null unless the plan has argmax",
       [](F& f) { f.problem.has.argmax = 0, f.buffers.argmax = nullptr; }},
      {"is_top1: expected null unless the plan has argmax",
       [](F& f) {
         f.problem.has.argmax = 0;
         f.buffers.argmax = f.buffers.correct_count = nullptr;
         f.buffers.is_top1 = reinterpret_cast<uint8_t*>(f.more.data());
       }},
      {"mean_logit: expected null unless the plan has it",
       [](F& f) { f.buffers.mean_logit = f.rows.data(); }},
      {"logit_sum: expected null unless the plan has mean_logit",
       [](F& f) { f.buffers.logit_sum = f.rows.data(); }},
      {"log_sum_sq_probs: expected null unless the plan has it",
       [](F& f) { f.buffers.log_sum_sq_probs = f.rows.data(); }},
      {"sum_sq_exp: expected null unless the plan has log_sum_sq_probs",
       [](F& f) { f.buffers.sum_sq_exp = f.rows.data(); }},
      // Several targets a row.
      {"target_weight: expected null without targets_per_row",
       [](F& f) { f.buffers.target_weight = f.more.data(); }},
      {"target_log_probs: expected null unless targets_per_row",
       [](F& f) { f.buffers.target_log_probs = f.rows.data(); }},
      {"class_weight: expected none with targets_per_row", [](F& f) { f.problem.targets_per_row = 2; }},
      {"class_weight: expected null unless the plan has it",
       [](F& f) { f.give_two_targets(), f.buffers.class_weight = f.more.data(); }},
      {"correct_count: expected null unless the plan has argmax, and with targets_per_row",
       [](F& f) { f.give_two_targets(), f.buffers.correct_count = f.counts.data(); }},
      {"targets: expected 0 <= target < 6 or ignore_index -100, got 6 at targets[3, 1]",
       [](F& f) { f.give_two_targets(), f.two_targets.back() = kVocab; }, LOGITLESS_INVALID_TARGET},
      // A backward pass.
      {"lse: expected a pointer", [](F& f) { f.go_backward(), f.buffers.lse = nullptr; }},
      {"grad_entropy: expected a pointer", [](F& f) { f.go_backward(), f.buffers.grad_entropy = nullptr; }},
      {"entropy: expected a pointer", [](F& f) { f.go_backward(), f.buffers.entropy = nullptr; }},
      {"grad_entropy: expected null unless the plan has it",
       [](F& f) { f.go_backward(), f.problem.has.grad_entropy = 0; }},
      {"grad_loss: expected a pointer",
       [](F& f) { f.go_backward(), f.problem.reduction = LOGITLESS_REDUCTION_NONE; }},
      // A shard.
      {"loss: expected null for a shard", [](F& f) { f.cut(), f.buffers.loss = f.rows.data(); }},
      {"max: expected a pointer", [](F& f) { f.cut(), f.buffers.max = nullptr; }},
      {"sum_exp: expected a pointer", [](F& f) { f.cut(), f.buffers.sum_exp = nullptr; }},
      {"target_logit: expected a pointer", [](F& f) { f.cut(), f.buffers.target_logit = nullptr; }},
      {"sum_exp_logit: expected a pointer", [](F& f) { f.cut(), f.buffers.sum_exp_logit = nullptr; }},
      {"weighted_logit_sum: expected a pointer",
       [](F& f) { f.cut(), f.buffers.weighted_logit_sum = nullptr; }},
      // Targets out of range. The place is the target's own, not that of the row that predicts it.
      {"targets: expected 0 <= target < 6 or ignore_index -100, got -2147483648 at targets[3]",
       [](F& f) {
         f.problem.dtype.targets = LOGITLESS_I32;
         f.buffers.targets = f.narrow_targets.data();
       },
       LOGITLESS_INVALID_TARGET},
      {"targets: expected 0 <= target < 6 or ignore_index -100, got 77 at targets[3]",
       [](F& f) {
         f.problem.shift = 1, f.problem.sequence_length = 2, f.targets = {0, 1, 2, 77};
       },
       LOGITLESS_INVALID_TARGET},
  };
  for (const int64_t bad : {kVocab, int64_t{-1}, INT64_MAX, INT64_MIN, int64_t{1} << 32}) {
    runs.push_back({"targets: expected 0 <= target < 6 or ignore_index -100, got ",
                    [bad](F& f) { f.targets[3] = bad; }, LOGITLESS_INVALID_TARGET});
  }
  return runs;
}

class RunArguments : public testing::TestWithParam<const char*> {};

TEST_P(RunArguments, RefusalsNameTheErrorAndNothingIsWritten) {
  for (const BadRun& bad : bad_runs()) {
    Fixture f;
    bad.spoil(f);
    const std::string refusal = f.refusal(GetParam());
    EXPECT_TRUE(refusal.starts_with(bad.message)) << refusal << "\nin place of " << bad.message;
    EXPECT_EQ(f.status, bad.status) << bad.message;
    EXPECT_TRUE(f.nothing_written()) << bad.message;
  }
}

TEST_P(RunArguments, StreamsBelongToDevices) {
  Fixture f;
  EXPECT_EQ(f.refusal(GetParam(), &f), "stream: expected null for buffers in host memory, got a pointer");
  EXPECT_TRUE(f.nothing_written());
}

TEST_P(RunArguments, UnspoiltRunsAreValid) {
  for (const auto& change : std::initializer_list<std::function<void(Fixture&)>>{
           [](Fixture&) {}, [](Fixture& f) { f.give_two_targets(); }, [](Fixture& f) { f.go_backward(); },
           [](Fixture& f) { f.cut(); },
           // A target that no row predicts is never read.
           [](Fixture& f) { f.problem.shift = 1, f.targets[0] = 1'000'000; }}) {
    Fixture f;
    change(f);
    EXPECT_EQ(f.refusal(GetParam()), "");
    EXPECT_FALSE(f.nothing_written());
  }
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
