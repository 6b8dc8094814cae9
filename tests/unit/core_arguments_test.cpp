// Every invalid option is refused by name, with what was expected and what was got; nothing is written.
#include <gtest/gtest.h>
#include <logitless/logitless.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace {

struct DestroyContext {
  void operator()(logitless_context* context) const { logitless_context_destroy(context); }
};
struct DestroyPlan {
  void operator()(logitless_plan* plan) const { logitless_plan_destroy(plan); }
};
using ContextHandle = std::unique_ptr<logitless_context, DestroyContext>;
using PlanHandle = std::unique_ptr<logitless_plan, DestroyPlan>;

ContextHandle make_context() {
  logitless_context* context = nullptr;
  EXPECT_EQ(logitless_context_create(nullptr, &context), LOGITLESS_OK);
  return ContextHandle(context);
}

logitless_problem valid_problem() {
  logitless_problem p;
  logitless_problem_init(&p);
  p.pass = LOGITLESS_FORWARD_BACKWARD;
  p.tokens = 6;
  p.vocab = 5;
  p.hidden = 4;
  p.has_bias = p.want_d_hidden = p.want_d_classifier = p.want_d_bias = 1;
  return p;
}

struct BadProblem {
  const char* argument;  // the message begins with it
  std::function<void(logitless_problem&)> spoil;
};

const double kNaN = std::numeric_limits<double>::quiet_NaN();
const double kInfinity = std::numeric_limits<double>::infinity();

std::vector<BadProblem> bad_problems() {
  using P = logitless_problem;
  std::vector<BadProblem> out = {
      {"logitless_problem.struct_size", [](P& p) { p.struct_size = 0; }},
      {"logitless_problem.struct_size", [](P& p) { p.struct_size = 7; }},
      {"logitless_problem.struct_size", [](P& p) { ++p.struct_size; }},
      {"logitless_problem.struct_size", [](P& p) { p.struct_size = SIZE_MAX; }},
      {"pass", [](P& p) { p.pass = -1; }},
      {"pass", [](P& p) { p.pass = 3; }},
      {"pass", [](P& p) { p.pass = LOGITLESS_FORWARD; }},  // yet gradients are wanted
      {"pass", [](P& p) { p.want_d_hidden = p.want_d_classifier = p.want_d_bias = 0; }},
      {"pass", [](P& p) { p.vocab_total = 6; }},  // a shard goes forward, then backward
      {"reduction", [](P& p) { p.reduction = 3; }},
      {"reduction", [](P& p) { p.reduction = -1; }},
      {"tokens", [](P& p) { p.tokens = -1; }},
      {"tokens", [](P& p) { p.tokens = INT64_MAX; }},
      {"vocab", [](P& p) { p.vocab = 0; }},
      {"vocab", [](P& p) { p.vocab = -5; }},
      {"vocab", [](P& p) { p.vocab = INT64_MAX; }},
      {"hidden", [](P& p) { p.hidden = 0; }},
      {"hidden", [](P& p) { p.hidden = INT64_MIN; }},
      {"tokens x vocab", [](P& p) { p.tokens = p.vocab = int64_t{1} << 39; }},
      {"tokens x hidden", [](P& p) { p.tokens = p.hidden = int64_t{1} << 39; }},
      {"vocab x hidden", [](P& p) { p.vocab = p.hidden = int64_t{1} << 39; }},
      {"vocab_total", [](P& p) { p.vocab_total = 4; }},
      {"vocab_total", [](P& p) { p.vocab_total = -1; }},
      {"vocab_start", [](P& p) { p.vocab_start = -1; }},
      {"vocab_start", [](P& p) { p.vocab_start = 1; }},
      {"vocab_start", [](P& p) { p.vocab_start = INT64_MAX; }},
      {"hidden_dtype", [](P& p) { p.hidden_dtype = LOGITLESS_I32; }},
      {"hidden_dtype", [](P& p) { p.hidden_dtype = 6; }},
      {"hidden_dtype", [](P& p) { p.hidden_dtype = -1; }},
      {"classifier_dtype", [](P& p) { p.classifier_dtype = LOGITLESS_F64; }},
      {"classifier_dtype", [](P& p) { p.hidden_dtype = LOGITLESS_F64; }},
      {"bias_dtype", [](P& p) { p.bias_dtype = LOGITLESS_F64; }},
      {"bias_dtype", [](P& p) { p.bias_dtype = LOGITLESS_I64; }},
      {"target_dtype", [](P& p) { p.target_dtype = LOGITLESS_F32; }},
      {"compute_dtype", [](P& p) { p.compute_dtype = LOGITLESS_F64; }},
      {"compute_dtype", [](P& p) { p.compute_dtype = LOGITLESS_I32; }},
      {"compute_dtype", [](P& p) { p.compute_dtype = -1; }},
      {"compute_dtype",
       [](P& p) {
         p.hidden_dtype = p.classifier_dtype = p.bias_dtype = LOGITLESS_F64;
         p.d_hidden_dtype = p.d_classifier_dtype = p.d_bias_dtype = LOGITLESS_F64;
         p.compute_dtype = LOGITLESS_BF16;
       }},
      {"allow_tf32", [](P& p) { p.allow_tf32 = 2; }},
      {"batch_invariant", [](P& p) { p.batch_invariant = 2; }},
      {"batch_invariant", [](P& p) { p.batch_invariant = 1, p.gradient = LOGITLESS_THINNED; }},
      {"d_hidden_dtype", [](P& p) { p.d_hidden_dtype = LOGITLESS_F64; }},
      {"d_classifier_dtype", [](P& p) { p.d_classifier_dtype = LOGITLESS_I64; }},
      {"d_bias_dtype", [](P& p) { p.d_bias_dtype = 99; }},
      {"scale", [](P& p) { p.scale = kNaN; }},
      {"scale", [](P& p) { p.scale = -kInfinity; }},
      {"scale", [](P& p) { p.scale = -1e38; }},
      {"softcap", [](P& p) { p.softcap = -1; }},
      {"softcap", [](P& p) { p.softcap = kInfinity; }},
      {"softcap", [](P& p) { p.softcap = 1e300; }},
      {"softcap", [](P& p) { p.softcap = 1e-300; }},
      {"temperature", [](P& p) { p.temperature = 0; }},
      {"temperature", [](P& p) { p.temperature = -1; }},
      {"temperature", [](P& p) { p.temperature = kNaN; }},
      {"temperature", [](P& p) { p.temperature = kInfinity; }},
      {"temperature", [](P& p) { p.temperature = 1e-38; }},
      {"temperature", [](P& p) { p.temperature = 1e38; }},
      {"temperature", [](P& p) { p.temperature = 1e-20, p.scale = 1e20; }},
      {"temperature", [](P& p) { p.temperature = 1e-20, p.softcap = 1e20; }},
      {"temperature", [](P& p) { p.temperature = 2, p.has_temperature = 1; }},
      {"top_k", [](P& p) { p.top_k = -1; }},
      {"top_k", [](P& p) { p.top_k = 6; }},  // of 5
      {"top_k", [](P& p) { p.vocab = 100, p.top_k = 65; }},
      {"top_k", [](P& p) { p.top_k = 2; }},  // in a pass with gradients
      {"top_k",
       [](P& p) {
         p.pass = LOGITLESS_FORWARD;
         p.want_d_hidden = p.want_d_classifier = p.want_d_bias = 0;
         p.vocab_total = 6;
         p.top_k = 2;
       }},
      {"top_k",
       [](P& p) {
         p.pass = LOGITLESS_FORWARD;
         p.want_d_hidden = p.want_d_classifier = p.want_d_bias = 0;
         p.gradient = LOGITLESS_THINNED;
         p.keeps_draws = 1;
         p.top_k = 2;
       }},
      {"targets_per_row", [](P& p) { p.targets_per_row = -1; }},
      {"targets_per_row", [](P& p) { p.targets_per_row = 65; }},
      {"targets_per_row", [](P& p) { p.targets_per_row = 2, p.gradient = LOGITLESS_THINNED; }},
      {"targets_per_row",
       [](P& p) {
         p.pass = LOGITLESS_FORWARD;
         p.want_d_hidden = p.want_d_classifier = p.want_d_bias = 0;
         p.vocab_total = 6;
         p.targets_per_row = 2;
       }},
      {"has_class_weight", [](P& p) { p.targets_per_row = 2, p.has_class_weight = 1; }},
      {"label_smoothing", [](P& p) { p.label_smoothing = -0.01; }},
      {"label_smoothing", [](P& p) { p.label_smoothing = 1.01; }},
      {"label_smoothing", [](P& p) { p.label_smoothing = kNaN; }},
      {"z_loss", [](P& p) { p.z_loss = -1e-4; }},
      {"z_loss", [](P& p) { p.z_loss = kNaN; }},
      {"num_items", [](P& p) { p.num_items = -1; }},
      {"num_items", [](P& p) { p.num_items = kInfinity; }},
      {"num_items", [](P& p) { p.num_items = 2, p.reduction = LOGITLESS_REDUCTION_SUM; }},
      {"shift", [](P& p) { p.shift = -1; }},
      {"shift", [](P& p) { p.shift = INT64_MAX; }},
      {"sequence_length", [](P& p) { p.sequence_length = -1; }},
      {"sequence_length", [](P& p) { p.sequence_length = 4; }},
      {"sequence_length", [](P& p) { p.sequence_length = 12; }},
      {"want_d_bias", [](P& p) { p.has_bias = 0; }},
      {"has_grad_nll", [](P& p) { p.has_grad_nll = 1; }},
      {"has_grad_entropy", [](P& p) { p.has_grad_entropy = 1; }},
      {"accumulate_d_hidden", [](P& p) { p.accumulate_d_hidden = 1, p.d_hidden_dtype = LOGITLESS_BF16; }},
      {"accumulate_d_hidden", [](P& p) { p.accumulate_d_hidden = 1, p.want_d_hidden = 0; }},
      {"accumulate_d_classifier",
       [](P& p) { p.accumulate_d_classifier = 1, p.d_classifier_dtype = LOGITLESS_F16; }},
      {"accumulate_d_bias", [](P& p) { p.accumulate_d_bias = 1, p.want_d_bias = 0; }},
  };
  const std::pair<const char*, int32_t P::*> flags[] = {
      {"has_bias", &P::has_bias},
      {"has_class_weight", &P::has_class_weight},
      {"has_token_weight", &P::has_token_weight},
      {"has_temperature", &P::has_temperature},
      {"want_entropy", &P::want_entropy},
      {"want_argmax", &P::want_argmax},
      {"want_d_hidden", &P::want_d_hidden},
      {"want_d_classifier", &P::want_d_classifier},
      {"want_d_bias", &P::want_d_bias},
      {"has_grad_nll", &P::has_grad_nll},
      {"has_grad_lse", &P::has_grad_lse},
      {"has_grad_entropy", &P::has_grad_entropy},
      {"has_grad_target_logit", &P::has_grad_target_logit},
      {"want_mean_logit", &P::want_mean_logit},
      {"want_log_sum_sq_probs", &P::want_log_sum_sq_probs},
      {"accumulate_d_hidden", &P::accumulate_d_hidden},
      {"accumulate_d_classifier", &P::accumulate_d_classifier},
      {"accumulate_d_bias", &P::accumulate_d_bias}};
  for (const auto& [name, member] : flags) {
    out.push_back({name, [member = member](P& p) { p.*member = 2; }});
    out.push_back({name, [member = member](P& p) { p.*member = -1; }});
  }
  return out;
}

void expect_refusal(logitless_status got, const std::string& argument) {
  const std::string message = logitless_last_error();
  EXPECT_EQ(got, LOGITLESS_INVALID_ARGUMENT) << argument << ": " << message;
  EXPECT_EQ(message.substr(0, argument.size()), argument) << message;
  EXPECT_NE(message.find(": expected "), std::string::npos) << message;
  EXPECT_NE(message.find(", got "), std::string::npos) << message;
}

TEST(Arguments, EveryInvalidOptionIsNamed) {
  const ContextHandle context = make_context();
  for (const BadProblem& bad : bad_problems()) {
    logitless_problem problem = valid_problem();
    bad.spoil(problem);
    auto* const untouched = reinterpret_cast<logitless_plan*>(8);
    logitless_plan* plan = untouched;
    expect_refusal(logitless_plan_create(context.get(), &problem, &plan), bad.argument);
    EXPECT_EQ(plan, untouched);
    int32_t count = -1;
    expect_refusal(logitless_plan_list(context.get(), &problem, nullptr, 0, &count), bad.argument);
    EXPECT_EQ(count, -1);
  }
}

TEST(Arguments, TheValidProblemIsValid) {
  const ContextHandle context = make_context();
  const logitless_problem problem = valid_problem();
  logitless_plan* plan = nullptr;
  EXPECT_EQ(logitless_plan_create(context.get(), &problem, &plan), LOGITLESS_OK) << logitless_last_error();
  logitless_plan_destroy(plan);
}

TEST(Arguments, NullPointersOfTheFunctions) {
  const ContextHandle context = make_context();
  const logitless_problem problem = valid_problem();
  logitless_plan* plan = nullptr;
  logitless_plan_info info;
  logitless_plan_info_init(&info);
  logitless_buffers buffers;
  logitless_buffers_init(&buffers);
  int32_t count = 0;
  expect_refusal(logitless_context_create(nullptr, nullptr), "context");
  expect_refusal(logitless_plan_create(nullptr, &problem, &plan), "context");
  expect_refusal(logitless_plan_create(context.get(), nullptr, &plan), "logitless_problem");
  expect_refusal(logitless_plan_create(context.get(), &problem, nullptr), "plan");
  expect_refusal(logitless_plan_get_info(nullptr, &info), "plan");
  expect_refusal(logitless_plan_list(nullptr, &problem, &info, 1, &count), "context");
  expect_refusal(logitless_plan_list(context.get(), &problem, nullptr, 1, &count), "infos");
  expect_refusal(logitless_plan_list(context.get(), &problem, &info, 1, nullptr), "count");
  expect_refusal(logitless_run(nullptr, &buffers, nullptr, 0, nullptr), "plan");
  ASSERT_EQ(logitless_plan_create(context.get(), &problem, &plan), LOGITLESS_OK);
  expect_refusal(logitless_plan_get_info(plan, nullptr), "info");
  expect_refusal(logitless_run(plan, nullptr, nullptr, 0, nullptr), "logitless_buffers");
  expect_refusal(logitless_row_stats_merge(&problem, &buffers, nullptr), "logitless_buffers");
  expect_refusal(logitless_row_stats_merge(&problem, &buffers, &buffers), "max");
  expect_refusal(logitless_row_stats_rebase(nullptr, &buffers, nullptr), "logitless_problem");
  expect_refusal(logitless_loss_from_row_stats(&problem, &buffers), "max");
  logitless_plan_destroy(plan);
  logitless_plan_destroy(nullptr);
  logitless_context_destroy(nullptr);
  logitless_problem_init(nullptr);
  logitless_buffers_init(nullptr);
}

TEST(Arguments, ContextOptions) {
  logitless_context* context = nullptr;
  const auto create = [&](const std::function<void(logitless_context_options&)>& change) {
    logitless_context_options options;
    logitless_context_options_init(&options);
    change(options);
    return logitless_context_create(&options, &context);
  };
  expect_refusal(create([](auto& o) { o.threads = -1; }), "threads");
  expect_refusal(create([](auto& o) { o.threads = 1 << 20; }), "threads");
  expect_refusal(create([](auto& o) { o.struct_size = 4096; }), "logitless_context_options.struct_size");
  const auto pool = [](int64_t, logitless_task, void*, void*) {};
  expect_refusal(create([&](auto& o) { o.parallel_for = pool; }), "threads");
  EXPECT_EQ(create([](auto& o) { o.backend = "abacus"; }), LOGITLESS_BACKEND_UNAVAILABLE);
  EXPECT_NE(std::string(logitless_last_error()).find("got abacus"), std::string::npos)
      << logitless_last_error();
  EXPECT_NE(std::string(logitless_last_error()).find("reference"), std::string::npos)
      << logitless_last_error();
  EXPECT_EQ(create([](auto& o) { o.isa = "mmx"; }), LOGITLESS_BACKEND_UNAVAILABLE);
  EXPECT_EQ(context, nullptr);
}

TEST(Arguments, BackendsAreListed) {
  std::vector<std::string> names;
  for (int32_t i = 0; i < logitless_backend_count(); ++i) names.emplace_back(logitless_backend_name(i));
  EXPECT_EQ(names, (std::vector<std::string>{"cuda", "cpu", "reference"}));
  EXPECT_EQ(logitless_backend_name(-1), nullptr);
  EXPECT_EQ(logitless_backend_name(logitless_backend_count()), nullptr);
  for (int32_t i = 0; i < logitless_backend_count(); ++i) {
    char description[8] = "xxxxxxx";
    char why[64] = "x";
    EXPECT_EQ(logitless_backend_info(i, description, sizeof description, why, sizeof why), LOGITLESS_OK);
    EXPECT_EQ(std::string(description).size(), 7u);  // cut, and terminated
    // CUDA is listed on a machine without a device, too, and says why it is not usable.
    if (names[static_cast<size_t>(i)] != "cuda") {
      EXPECT_STREQ(why, "");
    }
    EXPECT_EQ(logitless_backend_info(i, nullptr, 0, nullptr, 0), LOGITLESS_OK);
  }
  expect_refusal(logitless_backend_info(-1, nullptr, 0, nullptr, 0), "index");
}

// Buffers are in host memory unless a device is asked for, whatever backends come first in the list.
TEST(Arguments, AHostContextChoosesTheCpu) {
  const ContextHandle context = make_context();
  const logitless_problem problem = valid_problem();
  logitless_plan* made = nullptr;
  ASSERT_EQ(logitless_plan_create(context.get(), &problem, &made), LOGITLESS_OK) << logitless_last_error();
  const PlanHandle plan(made);
  logitless_plan_info info;
  logitless_plan_info_init(&info);
  ASSERT_EQ(logitless_plan_get_info(plan.get(), &info), LOGITLESS_OK);
  EXPECT_STREQ(info.backend, "cpu");
}

TEST(Arguments, NamesOfEverything) {
  for (int status = -1; status <= 8; ++status) {
    EXPECT_NE(logitless_status_name(static_cast<logitless_status>(status)), nullptr);
  }
  EXPECT_STREQ(logitless_status_name(LOGITLESS_OK), "ok");
  EXPECT_STREQ(logitless_plan_kind_name(LOGITLESS_PLAN_TOKEN_CHUNKS), "token_chunks");
}

}  // namespace
