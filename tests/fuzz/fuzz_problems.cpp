// Random problems. Half of them are fields of any value, which planning refuses or accepts but always
// survives; the others are small valid problems that every plan of every usable backend computes like
// float64.

#include <fuzzer/FuzzedDataProvider.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <logitless/logitless.hpp>

#include "commands/check.h"

namespace {

using namespace logitless;
using namespace logitless::cli;

void plan_anything(FuzzedDataProvider& input) {
  static const Context context;
  Problem problem;
  problem.pass = input.ConsumeIntegralInRange<int32_t>(-1, 3);
  problem.reduction = input.ConsumeIntegralInRange<int32_t>(-1, 3);
  for (int64_t* field :
       {&problem.tokens, &problem.vocab, &problem.hidden, &problem.vocab_start, &problem.vocab_total,
        &problem.ignore_index, &problem.shift, &problem.sequence_length}) {
    *field = input.ConsumeBool() ? input.ConsumeIntegralInRange<int64_t>(0, 5000)
                                 : input.ConsumeIntegral<int64_t>();
  }
  for (int32_t* field : {&problem.dtype.hidden, &problem.dtype.classifier, &problem.dtype.bias,
                         &problem.dtype.targets, &problem.dtype.d_hidden, &problem.dtype.d_classifier,
                         &problem.dtype.d_bias, &problem.compute_dtype}) {
    *field = input.ConsumeIntegralInRange<int32_t>(-1, 6);
  }
  for (double* field :
       {&problem.scale, &problem.softcap, &problem.label_smoothing, &problem.z_loss, &problem.num_items}) {
    *field = input.ConsumeBool() ? input.ConsumeProbability<double>() : input.ConsumeFloatingPoint<double>();
  }
  for (bool* field :
       {&problem.has.bias, &problem.has.class_weight, &problem.has.token_weight, &problem.has.entropy,
        &problem.has.argmax, &problem.has.d_hidden, &problem.has.d_classifier, &problem.has.d_bias,
        &problem.has.grad_nll, &problem.has.grad_lse, &problem.has.grad_entropy, &problem.accumulate.d_hidden,
        &problem.accumulate.d_classifier, &problem.accumulate.d_bias}) {
    *field = input.ConsumeBool();
  }
  problem.max_workspace_bytes = input.ConsumeIntegral<size_t>();
  problem.has.temperature = input.ConsumeBool();
  problem.batch_invariant = input.ConsumeBool();
  if (input.ConsumeBool()) problem.temperature = input.ConsumeFloatingPoint<double>();
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
  const logitless_dtype hidden = dtype(), classifier = dtype();
  CheckCase c = make_case("fuzz", {tokens, vocab, dim}, hidden, classifier);
  Problem& p = c.problem;
  c.logit_std = 10 * input.ConsumeProbability<double>();
  p.scale = input.ConsumeBool() ? 1 : 2 * input.ConsumeProbability<double>() - 1;
  p.softcap = input.ConsumeBool() ? 0 : 0.5 + 30 * input.ConsumeProbability<double>();
  p.label_smoothing = input.ConsumeBool() ? 0 : input.ConsumeProbability<double>();
  p.z_loss = input.ConsumeBool() ? 0 : 0.1 * input.ConsumeProbability<double>();
  const bool sum = input.ConsumeBool();
  if (sum) p.reduction = LOGITLESS_REDUCTION_SUM;
  p.num_items = sum || input.ConsumeBool() ? 0 : 1 + 1000 * input.ConsumeProbability<double>();
  p.has.bias = input.ConsumeBool();
  p.has.class_weight = input.ConsumeBool();
  p.has.token_weight = input.ConsumeBool();
  c.ignored_rows = input.ConsumeBool();
  p.shift = input.ConsumeIntegralInRange<int64_t>(0, 3);
  // A divisor of the tokens.
  p.sequence_length = input.ConsumeIntegralInRange<int64_t>(0, tokens);
  if (p.sequence_length != 0 && tokens % p.sequence_length != 0) p.sequence_length = 1;
  p.has.d_hidden = input.ConsumeBool();
  p.has.d_classifier = !p.has.d_hidden || input.ConsumeBool();
  p.has.temperature = input.ConsumeBool();
  p.temperature = p.has.temperature || input.ConsumeBool() ? 1 : 0.1 + 4 * input.ConsumeProbability<double>();
  return c;
}

void print(const CheckCase& c) {
  const Problem& p = c.problem;
  std::fprintf(
      stderr,
      "%s: logit_std %g, scale %g, softcap %g, smoothing %g, z_loss %g, num_items %g, reduction %d, bias %d, "
      "class_weight %d, token_weight %d, ignored_rows %d, shift %lld, sequence_length %lld, gradients of "
      "hidden %d, classifier %d, temperature %g, of tokens %d\n",
      c.name().c_str(), c.logit_std, p.scale, p.softcap, p.label_smoothing, p.z_loss, p.num_items,
      p.reduction, p.has.bias, p.has.class_weight, p.has.token_weight, c.ignored_rows,
      static_cast<long long>(p.shift), static_cast<long long>(p.sequence_length), p.has.d_hidden,
      p.has.d_classifier, p.temperature, p.has.temperature);
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
