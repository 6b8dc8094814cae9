// The refusal of every invalid option names it, what was expected and what came. Nothing is written.
#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "c_calls.h"

namespace {

logitless::Problem valid_problem() {
  logitless::Problem p;
  p.pass = LOGITLESS_FORWARD_BACKWARD;
  p.tokens = 6;
  p.vocab = 5;
  p.hidden = 4;
  p.has.bias = p.has.d_hidden = p.has.d_weight = p.has.d_bias = 1;
  return p;
}

struct BadProblem {
  const char* argument;  // the message begins with it
  std::function<void(logitless::Problem&)> spoil;
};

const double kNaN = std::numeric_limits<double>::quiet_NaN();
const double kInfinity = std::numeric_limits<double>::infinity();

// Problems with each option beyond either end of its range in options.def.
std::vector<BadProblem> out_of_range() {
  using P = logitless::Problem;
  std::vector<BadProblem> problems;
  const auto add_integer = [&]<class T>(const char* name, T P::*option, int64_t lowest, int64_t highest) {
    if constexpr (std::is_signed_v<T>) {
      if (lowest > std::numeric_limits<T>::min()) {
        problems.push_back({name, [=](P& p) { p.*option = static_cast<T>(lowest - 1); }});
      }
      if (highest < std::numeric_limits<T>::max()) {
        problems.push_back({name, [=](P& p) { p.*option = static_cast<T>(highest + 1); }});
      }
    }
  };
  const auto add_real = [&](const char* name, double P::*option, double lowest, double highest) {
    for (const double bad : {kNaN, kInfinity, -kInfinity, std::nextafter(lowest, -kInfinity),
                             std::nextafter(highest, kInfinity)}) {
      problems.push_back({name, [=](P& p) { p.*option = bad; }});
    }
  };
#define LOGITLESS_OPTION_INTEGER(name, NAME, type, default_value, lowest, highest, ...) \
  add_integer(#name, &P::name, lowest, static_cast<int64_t>(highest));
#define LOGITLESS_OPTION_REAL(name, NAME, default_value, lowest, highest, ...) \
  add_real(#name, &P::name, lowest, highest);
#define LOGITLESS_OPTION_CHOICE(name, NAME, type, default_value, values, ...) \
  add_integer(#name, &P::name, 0, std::ranges::count(std::string_view(values), '|'));
#include <logitless/options.def>
  return problems;
}

// Options that are in their ranges and do not fit each other.
std::vector<BadProblem> bad_problems() {
  using P = logitless::Problem;
  const auto forward = [](P& p) {
    p.pass = LOGITLESS_FORWARD;
    p.has.d_hidden = p.has.d_weight = p.has.d_bias = 0;
  };
  const auto in_float64 = [](P& p) {
    p.dtype.hidden = p.dtype.weight = p.dtype.bias = LOGITLESS_F64;
    p.dtype.d_hidden = p.dtype.d_weight = p.dtype.d_bias = LOGITLESS_F64;
  };
  std::vector<BadProblem> bad = {
      {"pass", [](P& p) { p.pass = LOGITLESS_FORWARD; }},  // yet gradients are wanted
      {"pass", [](P& p) { p.has.d_hidden = p.has.d_weight = p.has.d_bias = 0; }},
      {"pass", [](P& p) { p.vocab_total = 6; }},  // a shard goes forward, then backward
      {"vocab", [](P& p) { p.vocab = 0; }},
      {"tokens x vocab", [](P& p) { p.tokens = p.vocab = int64_t{1} << 39; }},
      {"tokens x hidden", [](P& p) { p.tokens = p.hidden = int64_t{1} << 39; }},
      {"vocab x hidden", [](P& p) { p.vocab = p.hidden = int64_t{1} << 39; }},
      {"vocab_total", [](P& p) { p.vocab_total = 4; }},
      {"vocab_start", [](P& p) { p.vocab_start = 1; }},
      {"hidden.dtype", [](P& p) { p.dtype.hidden = LOGITLESS_I32; }},
      {"hidden.dtype", [](P& p) { p.dtype.hidden = 6; }},
      {"hidden.dtype", [](P& p) { p.dtype.hidden = -1; }},
      {"weight.dtype", [](P& p) { p.dtype.weight = LOGITLESS_F64; }},
      {"weight.dtype", [](P& p) { p.dtype.hidden = LOGITLESS_F64; }},
      {"bias.dtype", [](P& p) { p.dtype.bias = LOGITLESS_F64; }},
      {"bias.dtype", [](P& p) { p.dtype.bias = LOGITLESS_I64; }},
      {"targets.dtype", [](P& p) { p.dtype.targets = LOGITLESS_F32; }},
      {"compute_dtype", [=](P& p) { in_float64(p), p.compute_dtype = LOGITLESS_BF16; }},
      {"compute_dtype", [=](P& p) { p.compute_dtype = LOGITLESS_F64; }},
      {"compute_dtype", [=](P& p) { p.compute_dtype = LOGITLESS_FP8, p.gradient = LOGITLESS_SPARSIFIED; }},
      {"top_k", [=](P& p) { forward(p), p.compute_dtype = LOGITLESS_FP8, p.top_k = 1; }},
      {"batch_invariant", [](P& p) { p.batch_invariant = 1, p.gradient = LOGITLESS_SPARSIFIED; }},
      {"d_hidden.dtype", [](P& p) { p.dtype.d_hidden = LOGITLESS_F64; }},
      {"d_weight.dtype", [](P& p) { p.dtype.d_weight = LOGITLESS_I64; }},
      {"d_bias.dtype", [](P& p) { p.dtype.d_bias = 99; }},
      {"scale", [](P& p) { p.scale = -1e38; }},
      {"softcap", [](P& p) { p.softcap = 1e300; }},
      {"softcap", [](P& p) { p.softcap = 1e-300; }},
      {"temperature", [](P& p) { p.temperature = 1e-38; }},
      {"temperature", [](P& p) { p.temperature = 1e38; }},
      {"temperature", [](P& p) { p.temperature = 1e-20, p.scale = 1e20; }},
      {"temperature", [](P& p) { p.temperature = 1e-20, p.softcap = 1e20; }},
      {"temperature", [](P& p) { p.temperature = 2, p.has.temperature = 1; }},
      {"top_k", [](P& p) { p.top_k = 6; }},  // of 5 columns
      {"top_k", [](P& p) { p.top_k = 2; }},  // in a pass with gradients
      {"top_k", [=](P& p) { forward(p), p.vocab_total = 6, p.top_k = 2; }},
      {"top_k", [=](P& p) { forward(p), p.gradient = LOGITLESS_SPARSIFIED, p.has.saved = 1, p.top_k = 2; }},
      {"num_samples", [](P& p) { p.num_samples = 2; }},  // in a pass with gradients
      {"num_samples", [=](P& p) { forward(p), p.num_samples = 65; }},
      {"num_samples", [=](P& p) { forward(p), p.num_samples = 2, p.top_k = 2; }},
      {"num_samples", [=](P& p) { forward(p), p.num_samples = 2, p.batch_invariant = 1; }},
      {"num_samples", [=](P& p) { forward(p), p.num_samples = 2, p.has.saved = 1; }},
      {"num_samples", [=](P& p) { forward(p), p.num_samples = 2, p.group_size = 2, p.group_vocab = 5; }},
      {"num_samples", [=](P& p) { forward(p), p.num_samples = 2, p.vocab_total = int64_t{1} << 32; }},
      {"screen_weight", [](P& p) { p.has.screen_weight = 1; }},
      {"screen_weight_bytes", [](P& p) { p.screen_weight_bytes = 64; }},
      {"sample_mask", [](P& p) { p.has.sample_mask = 1; }},
      {"sample_mask", [=](P& p) { forward(p), p.has.sample_mask = 1; }},
      {"sample_mask",
       [=](P& p) { forward(p), p.top_k = 2, p.has.sample_mask = 1, p.group_size = 2, p.group_vocab = 5; }},
      {"sample_mask", [=](P& p) { forward(p), p.top_k = 2, p.has.sample_mask = 1, p.targets_per_row = 2; }},
      {"targets_per_row", [](P& p) { p.targets_per_row = 2, p.gradient = LOGITLESS_SPARSIFIED; }},
      {"targets_per_row", [=](P& p) { forward(p), p.vocab_total = 6, p.targets_per_row = 2; }},
      {"class_weight", [](P& p) { p.targets_per_row = 2, p.has.class_weight = 1; }},
      {"num_items", [](P& p) { p.num_items = 2, p.reduction = LOGITLESS_REDUCTION_SUM; }},
      {"sequence_length", [](P& p) { p.sequence_length = 4; }},
      {"sequence_length", [](P& p) { p.sequence_length = 12; }},
      {"d_bias", [](P& p) { p.has.bias = 0; }},
      {"grad_nll", [](P& p) { p.has.grad_nll = 1; }},
      {"grad_entropy", [](P& p) { p.has.grad_entropy = 1; }},
      {"d_hidden.accumulate", [](P& p) { p.accumulate.d_hidden = 1, p.dtype.d_hidden = LOGITLESS_BF16; }},
      {"d_weight.accumulate", [](P& p) { p.accumulate.d_weight = 1, p.dtype.d_weight = LOGITLESS_F16; }},
  };
  const std::vector<BadProblem> more = out_of_range();
  bad.insert(bad.end(), more.begin(), more.end());
  return bad;
}

void expect_refusal(logitless_status got, const std::string& argument) {
  const std::string message = logitless_last_error();
  EXPECT_EQ(got, LOGITLESS_INVALID_ARGUMENT) << argument << ": " << message;
  EXPECT_EQ(message.substr(0, argument.size()), argument) << message;
  EXPECT_NE(message.find(": expected "), std::string::npos) << message;
  EXPECT_NE(message.find(", got "), std::string::npos) << message;
}

TEST(Arguments, EveryInvalidOptionIsNamed) {
  const logitless::Context context;
  for (const BadProblem& bad : bad_problems()) {
    logitless::Problem problem = valid_problem();
    bad.spoil(problem);
    auto* const untouched = reinterpret_cast<logitless_plan*>(8);
    logitless_plan* plan = untouched;
    expect_refusal(logitless_plan_create(context.handle(), &problem, &plan), bad.argument);
    EXPECT_EQ(plan, untouched);
    int32_t count = -1;
    expect_refusal(logitless_plan_list(context.handle(), &problem, nullptr, 0, &count), bad.argument);
    EXPECT_EQ(count, -1);
  }
}

TEST(Arguments, TheValidProblemIsValid) {
  EXPECT_NO_THROW(logitless::Plan(logitless::Context(), valid_problem()));
}

TEST(Arguments, NullPointersOfTheFunctions) {
  const logitless::Context context;
  const logitless::Problem problem = valid_problem();
  logitless_plan* plan = nullptr;
  logitless_plan_info info;
  logitless::Buffers buffers;
  int32_t count = 0;
  expect_refusal(logitless_context_create(nullptr, nullptr), "context");
  expect_refusal(logitless_plan_create(nullptr, &problem, &plan), "context");
  expect_refusal(logitless_plan_create(context.handle(), nullptr, 1, nullptr, 0, &plan), "options");
  expect_refusal(logitless_plan_create(context.handle(), nullptr, 0, nullptr, 1, &plan), "tensors");
  expect_refusal(logitless_plan_create(context.handle(), &problem, nullptr), "plan");
  expect_refusal(logitless_plan_get_info(nullptr, &info), "plan");
  expect_refusal(logitless_plan_list(nullptr, &problem, &info, 1, &count), "context");
  expect_refusal(logitless_plan_list(context.handle(), &problem, nullptr, 1, &count), "infos");
  expect_refusal(logitless_plan_list(context.handle(), &problem, &info, 1, nullptr), "count");
  expect_refusal(logitless_run(nullptr, &buffers, nullptr, 0, nullptr), "plan");
  ASSERT_EQ(logitless_plan_create(context.handle(), &problem, &plan), LOGITLESS_OK);
  expect_refusal(logitless_plan_get_info(plan, nullptr), "info");
  expect_refusal(logitless_run(plan, nullptr, 1, nullptr, 0, nullptr), "tensors");
  expect_refusal(logitless_row_stats_merge(plan, nullptr, 0, nullptr, 1), "tensors");
  expect_refusal(logitless_row_stats_merge(plan, nullptr, 0, nullptr, 0), "max");
  expect_refusal(logitless_row_stats_rebase(nullptr, nullptr, 0, nullptr), "plan");
  expect_refusal(logitless_loss_from_row_stats(plan, nullptr, 0), "max");
  logitless_plan_destroy(plan);
  logitless_plan_destroy(nullptr);
  logitless_context_destroy(nullptr);
}

// Ids, fields and dtypes of the arrays themselves.
TEST(Arguments, OptionsAndTensorsById) {
  const logitless::Context context;
  const logitless_option options[] = {
      {LOGITLESS_OPTION_TOKENS, 6, 0}, {LOGITLESS_OPTION_VOCAB, 5, 0}, {LOGITLESS_OPTION_HIDDEN, 4, 0}};
  logitless_plan* plan = nullptr;
  const auto refuses = [&](const logitless_option& option, const std::string& message) {
    std::vector<logitless_option> given(std::begin(options), std::end(options));
    given.push_back(option);
    expect_refusal(logitless_plan_create(context.handle(), given.data(), given.size(), nullptr, 0, &plan),
                   message);
  };
  refuses({-1, 0, 0}, "options.id: expected 0 to ");
  refuses({LOGITLESS_OPTION_COUNT, 0, 0}, "options.id: expected 0 to ");
  refuses({LOGITLESS_OPTION_VOCAB, 5, 0}, "options: expected each once, got vocab twice");
  refuses({LOGITLESS_OPTION_SOFTCAP, 30, 0}, "softcap: expected its value in `real`, got 30 in `integer`");
  refuses({LOGITLESS_OPTION_TOP_K, 0, 2}, "top_k: expected its value in `integer`, got 2 in `real`");
  refuses({LOGITLESS_OPTION_SEED, 0, kNaN}, "seed: expected its value in `integer`");
  refuses({LOGITLESS_OPTION_GROUP_SIZE, int64_t{1} << 32, 0}, "group_size: expected a number in [");
  refuses({LOGITLESS_OPTION_MAX_WORKSPACE_BYTES, -1, 0}, "max_workspace_bytes: expected a number in [0, ");
  refuses({LOGITLESS_OPTION_ALLOW_TF32, 2, 0}, "allow_tf32: expected 0 or 1, got 2");
  refuses({LOGITLESS_OPTION_BATCH_INVARIANT, -1, 0}, "batch_invariant: expected 0 or 1, got -1");
  const auto refuses_tensor = [&](const logitless_tensor_desc& tensor, const std::string& message) {
    const logitless_tensor_desc given[] = {{LOGITLESS_TENSOR_BIAS, LOGITLESS_F32, 0}, tensor};
    expect_refusal(logitless_plan_create(context.handle(), options, 3, given, 2, &plan), message);
  };
  refuses_tensor({LOGITLESS_TENSOR_COUNT, 0, 0}, "tensors.id: expected 0 to ");
  refuses_tensor({LOGITLESS_TENSOR_BIAS, 0, 0}, "tensors: expected each once, got bias twice");
  refuses_tensor({LOGITLESS_TENSOR_HIDDEN, 6, 0}, "hidden.dtype: expected 0 to 5, got 6");
  refuses_tensor({LOGITLESS_TENSOR_TARGETS, LOGITLESS_F32, 0}, "targets.dtype: expected int32 or int64");
  refuses_tensor({LOGITLESS_TENSOR_ENTROPY, LOGITLESS_BF16, 0}, "entropy.dtype: expected 0");
  refuses_tensor({LOGITLESS_TENSOR_ARGMAX, LOGITLESS_I32, 0}, "argmax.dtype: expected 0");
  refuses_tensor({LOGITLESS_TENSOR_NLL, 0, 1}, "nll.accumulate: expected 0");
  refuses_tensor({LOGITLESS_TENSOR_D_HIDDEN, 0, 2}, "d_hidden.accumulate: expected 0 or 1, got 2");
  ASSERT_EQ(logitless_plan_create(context.handle(), options, 3, nullptr, 0, &plan), LOGITLESS_OK);
  float data[64] = {};
  const auto refuses_run = [&](const logitless_tensor& tensor, const std::string& message) {
    const logitless_tensor given[] = {{LOGITLESS_TENSOR_NLL, data, 0}, tensor};
    expect_refusal(logitless_run(plan, given, 2, nullptr, 0, nullptr), message);
  };
  refuses_run({-1, data, 0}, "tensors.id: expected 0 to ");
  refuses_run({LOGITLESS_TENSOR_NLL, data, 0}, "tensors: expected each once, got nll twice");
  refuses_run({LOGITLESS_TENSOR_LSE, data, 6}, "lse.stride: expected 0");
  logitless_plan_destroy(plan);
}

// A failure is reported as data as well: nobody has to parse the message.
// The refusal of a plan's call with so many targets of a dtype, or "". from_buffers: the plan is made for the
// buffers.
template <class Y>
std::string refusal_of_targets(const logitless::Problem& problem, bool from_buffers, size_t count,
                               void (*call)(const logitless::Plan&, const logitless::Buffers&)) {
  const std::vector<float> hidden(24, 0.5F), weight(20, 0.25F);
  const std::vector<Y> targets(count, 1);
  float loss = 0;
  try {
    logitless::Buffers buffers = logitless::make_buffers(logitless::Matrix<const float>{hidden.data(), 6, 4},
                                                         logitless::Matrix<const float>{weight.data(), 5, 4},
                                                         std::span<const Y>(targets));
    buffers.loss = &loss;
    const logitless::Context context;
    call(from_buffers ? logitless::Plan(context, problem, buffers) : logitless::Plan(context, problem),
         buffers);
  } catch (const logitless::Error& error) {
    return error.what();
  }
  return "";
}

TEST(Arguments, TargetsOfAnotherDtypeOrNumberAreRefused) {
  const auto run = [](const logitless::Plan& plan, const logitless::Buffers& buffers) {
    const logitless::Workspace workspace(static_cast<size_t>(plan.info().workspace_bytes));
    plan.run(buffers, workspace.bytes());
  };
  logitless::Problem p;
  p.tokens = 6;
  p.vocab = 5;
  p.hidden = 4;
  p.has.loss = true;
  const std::string dtype = "targets: expected int64 as in the plan, got int32";
  EXPECT_EQ(refusal_of_targets<int64_t>(p, false, 6, run), "");
  EXPECT_EQ(refusal_of_targets<int32_t>(p, true, 6, run), "");  // the plan takes the dtype of the buffers
  EXPECT_EQ(refusal_of_targets<int32_t>(p, false, 6, run), dtype);
  EXPECT_EQ(refusal_of_targets<int32_t>(p, false, 6, logitless::loss_from_row_stats), dtype);
  EXPECT_EQ(refusal_of_targets<int64_t>(p, true, 12, run),
            "targets: expected 6 entries as in the plan, got 12");
  EXPECT_EQ(refusal_of_targets<int64_t>(p, true, 7, run),
            "targets: expected 6 entries, one a row of hidden, or a multiple, got 7");
  p.targets_per_row = 2;
  EXPECT_EQ(refusal_of_targets<int64_t>(p, true, 12, run), "");
  EXPECT_EQ(refusal_of_targets<int64_t>(p, true, 6, run),
            "targets: expected 12 entries as in the plan, got 6");
}

TEST(Arguments, ErrorsAreData) {
  const logitless::Context context;
  logitless::Problem problem = valid_problem();
  problem.label_smoothing = 2;
  logitless_plan* plan = nullptr;
  expect_refusal(logitless_plan_create(context.handle(), &problem, &plan), "label_smoothing");
  logitless_error_info info;
  logitless_last_error_info(&info);
  EXPECT_EQ(info.status, LOGITLESS_INVALID_ARGUMENT);
  EXPECT_STREQ(info.argument, "label_smoothing");
  EXPECT_STREQ(info.expected, "a number in [0, 1]");
  EXPECT_STREQ(info.got, "2");
  EXPECT_EQ(info.required_bytes, 0u);
  EXPECT_EQ(info.row, -1);
  logitless_last_error_info(nullptr);
  problem = valid_problem();
  problem.max_workspace_bytes = 1;
  ASSERT_EQ(logitless_plan_create(context.handle(), &problem, &plan), LOGITLESS_BUDGET_TOO_SMALL);
  logitless_last_error_info(&info);
  EXPECT_STREQ(info.argument, "max_workspace_bytes");
  problem.max_workspace_bytes = info.required_bytes;
  EXPECT_EQ(logitless_plan_create(context.handle(), &problem, &plan), LOGITLESS_OK) << logitless_last_error();
  logitless_plan_destroy(plan);
}

TEST(Arguments, TheSchemaHasEveryOptionAndTensor) {
  const std::string schema = logitless_schema();
  EXPECT_EQ(logitless_abi_version(), LOGITLESS_ABI_VERSION);
  for (const std::string name : {
#define LOGITLESS_OPTION(name, NAME) #name,
#include <logitless/options.def>
#define LOGITLESS_TENSOR(name, ...) #name,
#include <logitless/tensors.def>
       }) {
    EXPECT_NE(schema.find("\"name\":\"" + name + "\""), std::string::npos) << name;
  }
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
  const auto pool = [](int64_t, logitless_task, void*, void*) {};
  expect_refusal(create([&](auto& o) { o.parallel_for = pool; }), "threads");
  EXPECT_EQ(create([](auto& o) { o.backend = "abacus"; }), LOGITLESS_BACKEND_UNAVAILABLE);
  EXPECT_NE(std::string(logitless_last_error()).find("got abacus"), std::string::npos)
      << logitless_last_error();
  EXPECT_NE(std::string(logitless_last_error()).find("reference"), std::string::npos)
      << logitless_last_error();
  EXPECT_EQ(create([](auto& o) { o.engine = "mmx"; }), LOGITLESS_BACKEND_UNAVAILABLE);
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
    // CUDA is listed even on a machine without a device, and says why it is not usable.
    if (names[static_cast<size_t>(i)] != "cuda") {
      EXPECT_STREQ(why, "");
    }
    EXPECT_EQ(logitless_backend_info(i, nullptr, 0, nullptr, 0), LOGITLESS_OK);
  }
  expect_refusal(logitless_backend_info(-1, nullptr, 0, nullptr, 0), "index");
}

// Buffers are in host memory unless a device is chosen, whatever backends come first in the list.
TEST(Arguments, AHostContextChoosesTheCpu) {
  EXPECT_STREQ(logitless::Plan(logitless::Context(), valid_problem()).info().backend, "cpu");
}

TEST(Arguments, NamesOfEverything) {
  for (int status = -1; status <= 8; ++status) {
    EXPECT_NE(logitless_status_name(static_cast<logitless_status>(status)), nullptr);
  }
  EXPECT_STREQ(logitless_status_name(LOGITLESS_OK), "ok");
  EXPECT_STREQ(logitless_plan_kind_name(LOGITLESS_PLAN_TOKEN_CHUNKS), "token_chunks");
}

}  // namespace
