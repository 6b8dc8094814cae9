// Random problems.
// Half of them are fields of any value. Planning may refuse or accept these, but always survives. The others
// are small valid problems, which every plan of every usable backend computes like float64.

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <logitless/logitless.hpp>
#include <type_traits>

#include "commands/check.h"
#include "commands/options.h"
#include "commands/run.h"

namespace {

using namespace logitless;
using namespace logitless::cli;

void plan_anything(FuzzedDataProvider& input) {
  static const Context context;
  Problem problem;
  for_each_option(problem, [&](const OptionLine& line, auto& value) {
    using T = std::remove_reference_t<decltype(value)>;
    const bool is_small = input.ConsumeBool();
    if constexpr (std::is_same_v<T, bool>) {
      value = is_small;
    } else if constexpr (std::is_same_v<T, double>) {
      value = is_small ? input.ConsumeProbability<double>() : input.ConsumeFloatingPoint<double>();
    } else if (line.values != nullptr) {
      value = input.ConsumeIntegralInRange<T>(0, 6) - T{1};
    } else {
      value = is_small ? input.ConsumeIntegralInRange<T>(0, 5000) : input.ConsumeIntegral<T>();
    }
  });
#define LOGITLESS_TENSOR(name, ...) problem.has.name = input.ConsumeBool();
#include <logitless/tensors.def>
  for (int32_t* field :
       {&problem.dtype.hidden, &problem.dtype.weight, &problem.dtype.bias, &problem.dtype.targets,
        &problem.dtype.d_hidden, &problem.dtype.d_weight, &problem.dtype.d_bias}) {
    *field = input.ConsumeIntegralInRange<int32_t>(-1, 6);
  }
  for (bool* field :
       {&problem.accumulate.d_hidden, &problem.accumulate.d_weight, &problem.accumulate.d_bias}) {
    *field = input.ConsumeBool();
  }
  try {
    const PlanInfo info = Plan(context, problem).info();
    const bool within =
        problem.max_workspace_bytes == 0 || info.workspace_bytes <= problem.max_workspace_bytes;
    if (!within) std::abort();
  } catch (const Error& error) {
    if (error.what()[0] == '\0' || error.status() == LOGITLESS_INTERNAL) std::abort();
  }
}

CheckCase any_case(FuzzedDataProvider& input) {
  const auto dtype = [&] { return static_cast<logitless_dtype>(input.ConsumeIntegralInRange<int>(0, 2)); };
  const auto size = [&](int64_t most) { return input.ConsumeIntegralInRange<int64_t>(1, most); };
  const int64_t tokens = size(70), vocab = size(700), dim = size(70);
  const logitless_dtype hidden = dtype(), weight = dtype();
  CheckCase c = make_case("fuzz", {tokens, vocab, dim}, hidden, weight);
  Problem& p = c.problem;
  c.logit_std = 10 * input.ConsumeProbability<double>();
  for_each_option(p, [&](const OptionLine& line, auto& value) {
    if constexpr (std::is_same_v<decltype(value), double&>) {
      if (input.ConsumeBool()) return;
      // Factors of either sign are small; others reach caps and divisors of real problems.
      const double low = std::max(line.lowest, -1.0);
      const double high = std::min(line.highest, line.lowest < 0 ? 2.0 : 32.0);
      value = std::max(low + (high - low) * input.ConsumeProbability<double>(), std::min(low + 0.1, high));
    }
  });
  const bool sum = input.ConsumeBool();
  if (sum) p.reduction = LOGITLESS_REDUCTION_SUM;
  if (sum) p.num_items = 0;
  p.has.bias = input.ConsumeBool();
  p.has.class_weight = input.ConsumeBool();
  p.has.token_weight = input.ConsumeBool();
  c.ignored_rows = input.ConsumeBool();
  p.shift = input.ConsumeIntegralInRange<int64_t>(0, 3);
  // A divisor of the tokens.
  p.sequence_length = input.ConsumeIntegralInRange<int64_t>(0, tokens);
  if (p.sequence_length != 0 && tokens % p.sequence_length != 0) p.sequence_length = 1;
  p.has.d_hidden = input.ConsumeBool();
  p.has.d_weight = !p.has.d_hidden || input.ConsumeBool();
  p.has.temperature = input.ConsumeBool();
  if (p.has.temperature) p.temperature = 1;
  return c;
}

void print(CheckCase c) {
  std::fprintf(stderr, "%s: logit_std %g, ignored_rows %d", c.name().c_str(), c.logit_std, c.ignored_rows);
  for_each_option(c.problem, [](const OptionLine& line, auto& value) {
    std::fprintf(stderr, ", %s %g", line.name, static_cast<double>(value));
  });
#define LOGITLESS_TENSOR(name, ...) \
  if (c.problem.has.name) std::fprintf(stderr, ", " #name);
#include <logitless/tensors.def>
  std::fprintf(stderr, "\n");
}

Context make_named_context(const char* backend) {
  ContextOptions options;
  options.backend = backend;
  return Context(options);
}

void compute(FuzzedDataProvider& input) {
  static const Context best;
  static const Context oracle = make_named_context("reference");
  const CheckCase c = any_case(input);
  const CheckData data(c);
  Runner reference_runner(oracle, LOGITLESS_HOST_MEMORY);
  const CheckOutputs truth = run_case(reference_runner, c, data, true, 0);
  const bool is_fp16 = c.problem.dtype.hidden == LOGITLESS_F16 || c.problem.dtype.weight == LOGITLESS_F16;
  for (const auto* gradient : {&truth.d_hidden, &truth.d_weight, &truth.d_bias}) {
    for (const double value : *gradient) {
      if (is_fp16 && std::fabs(value) > 0x1p15) return;  // fp16 holds little more
    }
  }
  for (const size_t workspace : workspaces_of(best, c)) {
    Runner best_runner(best, LOGITLESS_HOST_MEMORY);  // a workspace of its own, whose ends are watched
    const CheckOutputs got = run_case(best_runner, c, data, false, workspace);
    for (const CheckedOutput& output : compare(c, data, truth, got, false)) {
      if (output.passed()) continue;
      print(c);
      std::fprintf(stderr, "workspace %zu: %s: error %g, bound %g\n", workspace, output.name.c_str(),
                   output.error, output.bound);
      std::abort();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  if (input.ConsumeBool()) {
    plan_anything(input);
  } else {
    compute(input);
  }
  return 0;
}
