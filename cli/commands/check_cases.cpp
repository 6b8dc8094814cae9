#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>

#include "commands/check.h"
#include "commands/options.h"

namespace logitless::cli {
namespace {

using Sizes = std::array<int64_t, 3>;
// One element; less than any vector; odd; just past round sizes; round.
constexpr std::array<Sizes, 6> kShapes{
    {{1, 1, 1}, {3, 5, 2}, {17, 131, 33}, {65, 257, 129}, {64, 1024, 64}, {253, 770, 48}}};
constexpr std::array<Sizes, 3> kLargeShapes{{{300, 5003, 257}, {40, 20011, 512}, {1030, 2049, 96}}};

constexpr std::array<std::array<logitless_dtype, 2>, 4> kPairs{{{LOGITLESS_F32, LOGITLESS_F32},
                                                                {LOGITLESS_BF16, LOGITLESS_BF16},
                                                                {LOGITLESS_F16, LOGITLESS_F16},
                                                                {LOGITLESS_BF16, LOGITLESS_F32}}};

struct OptionSet {
  const char* name;
  void (*set)(CheckCase& c, Problem& p);
};
constexpr std::array kSets{
    OptionSet{"plain", [](CheckCase&, Problem&) {}},
    OptionSet{"bias", [](CheckCase&, Problem& p) { p.has.bias = 1; }},
    OptionSet{"softcap", [](CheckCase&, Problem& p) { p.softcap = 5, p.scale = 1.5; }},
    OptionSet{"scale", [](CheckCase&, Problem& p) { p.scale = 0.25; }},
    OptionSet{"temperature",
              [](CheckCase&, Problem& p) { p.temperature = 0.3, p.softcap = 10, p.has.bias = 1; }},
    OptionSet{"token-temperature",
              [](CheckCase& c, Problem& p) { p.has.temperature = c.ignored_rows = true; }},
    OptionSet{"smoothing", [](CheckCase&, Problem& p) { p.label_smoothing = 0.1; }},
    OptionSet{"z-loss", [](CheckCase&, Problem& p) { p.z_loss = 1e-2; }},
    OptionSet{"class-weight",
              [](CheckCase&, Problem& p) { p.has.class_weight = 1, p.label_smoothing = 0.2; }},
    OptionSet{"token-weight", [](CheckCase&, Problem& p) { p.has.token_weight = 1; }},
    OptionSet{"ignored-rows", [](CheckCase& c, Problem&) { c.ignored_rows = true; }},
    OptionSet{"shift", [](CheckCase&, Problem& p) { p.shift = 2; }},
    OptionSet{"sum", [](CheckCase&, Problem& p) { p.reduction = LOGITLESS_REDUCTION_SUM; }},
    OptionSet{"num-items", [](CheckCase&, Problem& p) { p.num_items = 12345; }},
    OptionSet{"large-logits", [](CheckCase& c, Problem&) { c.logit_std = 30; }},
    OptionSet{"frozen-hidden", [](CheckCase&, Problem& p) { p.has.d_hidden = 0; }},
    OptionSet{"frozen-classifier", [](CheckCase&, Problem& p) { p.has.d_classifier = 0; }},
    OptionSet{"all", [](CheckCase& c, Problem& p) {
                p.scale = 1.25, p.softcap = 8, p.label_smoothing = 0.1, p.z_loss = 1e-3, p.shift = 1;
                p.has.bias = p.has.class_weight = p.has.token_weight = p.has.temperature = c.ignored_rows =
                    true;
              }}};

std::vector<std::byte> encode(const std::vector<double>& values, int32_t dtype) {
  const auto size = static_cast<size_t>(dtype_bytes(dtype));
  std::vector<std::byte> out(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto narrow = static_cast<float>(values[i]);
    const uint16_t half = dtype == LOGITLESS_BF16 ? float_to_bf16(narrow) : float_to_f16(narrow);
    const void* from = size == 8   ? static_cast<const void*>(&values[i])
                       : size == 4 ? static_cast<const void*>(&narrow)
                                   : &half;
    std::memcpy(&out[i * size], from, size);
  }
  return out;
}

std::vector<double> decode(const std::vector<std::byte>& bytes, int32_t dtype) {
  TensorView view;
  view.dtype = element_from_dtype(dtype);
  view.data = bytes;
  std::vector<double> out(bytes.size() / static_cast<size_t>(dtype_bytes(dtype)));
  for (size_t i = 0; i < out.size(); ++i) out[i] = real_element(view, static_cast<int64_t>(i));
  return out;
}

// As the dtype holds them.
template <class Distribution>
std::vector<double> numbers(std::mt19937_64& random, int64_t count, Distribution distribution,
                            int32_t dtype) {
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = distribution(random);
  return decode(encode(values, dtype), dtype);
}

Problem problem_of(const CheckCase& c, size_t budget) {
  Problem problem = c.problem;
  problem.has.d_bias = problem.has.bias && problem.has.d_classifier;
  problem.max_workspace_bytes = budget;
  return problem;
}

}  // namespace

std::string CheckCase::name() const {
  std::string text = std::to_string(problem.tokens) + "x" + std::to_string(problem.vocab) + "x" +
                     std::to_string(problem.hidden) + " " + dtype_text(problem.dtype.hidden);
  if (problem.dtype.classifier != problem.dtype.hidden)
    text += std::string("/") + dtype_text(problem.dtype.classifier);
  return text + " " + options;
}

CheckCase make_case(std::string options, const Sizes& sizes, logitless_dtype hidden,
                    logitless_dtype classifier) {
  CheckCase c;
  c.options = std::move(options);
  Problem& p = c.problem;
  p.pass = LOGITLESS_FORWARD_BACKWARD;
  p.reduction = LOGITLESS_REDUCTION_MEAN;
  p.tokens = sizes[0], p.vocab = sizes[1], p.hidden = sizes[2];
  p.dtype.hidden = p.dtype.d_hidden = hidden;
  p.dtype.classifier = p.dtype.d_classifier = p.dtype.bias = p.dtype.d_bias = classifier;
  p.has.entropy = p.has.argmax = p.has.d_hidden = p.has.d_classifier = 1;
  return c;
}

std::vector<CheckCase> check_grid(bool full) {
  std::vector<CheckCase> grid;
  const auto add = [&](const Sizes& sizes, const OptionSet& options) {
    for (const auto& [hidden, classifier] : kPairs) {
      grid.push_back(make_case(options.name, sizes, hidden, classifier));
      options.set(grid.back(), grid.back().problem);
    }
  };
  for (const Sizes& sizes : kShapes) {
    for (const OptionSet& options : kSets) add(sizes, options);
  }
  for (const Sizes& sizes : kLargeShapes) {
    if (full) add(sizes, kSets.front()), add(sizes, kSets.back());
  }
  return grid;
}

CheckData::CheckData(const CheckCase& c) {
  const Problem& p = c.problem;
  std::mt19937_64 random(static_cast<uint64_t>(p.tokens * 1000003 + p.vocab * 1009 + p.hidden));
  using Normal = std::normal_distribution<double>;
  hidden = numbers(random, p.tokens * p.hidden, Normal(0, 1), p.dtype.hidden);
  classifier = numbers(random, p.vocab * p.hidden,
                       Normal(0, c.logit_std / std::sqrt(static_cast<double>(p.hidden))), p.dtype.classifier);
  if (p.has.bias) bias = numbers(random, p.vocab, Normal(0, 1), p.dtype.bias);
  const std::uniform_real_distribution<double> weight(0.25, 2);
  if (p.has.class_weight) class_weight = numbers(random, p.vocab, weight, LOGITLESS_F32);
  if (p.has.token_weight) token_weight = numbers(random, p.tokens, weight, LOGITLESS_F32);
  if (p.has.temperature) temperature = numbers(random, p.tokens, weight, LOGITLESS_F32);
  std::uniform_int_distribution<int64_t> ids(0, p.vocab - 1);
  for (int64_t i = 0; i < p.tokens; ++i) {
    targets.push_back(c.ignored_rows && i % 3 == 1 ? p.ignore_index : ids(random));
  }
}

std::vector<size_t> workspaces_of(const Context& context, const CheckCase& c) {
  std::vector<size_t> sizes;
  for (const size_t budget : {size_t{0}, size_t{1}}) {
    for (const PlanInfo& plan : context.plans(problem_of(c, budget))) sizes.push_back(plan.workspace_bytes);
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes;
}

CheckOutputs run_case(Runner& runner, const CheckCase& c, const CheckData& data, bool float64,
                      size_t budget) {
  Problem problem = problem_of(c, budget);
  for (int32_t* dtype : {&problem.dtype.hidden, &problem.dtype.classifier, &problem.dtype.bias,
                         &problem.dtype.d_hidden, &problem.dtype.d_classifier, &problem.dtype.d_bias}) {
    if (float64) *dtype = LOGITLESS_F64;
  }
  const int32_t stats = float64 ? LOGITLESS_F64 : LOGITLESS_F32;
  using B = logitless::Buffers;
  std::vector<std::vector<std::byte>> inputs;
  RunTensors tensors;
  const auto add_input = [&]<auto kField>(const std::vector<double>& values, int32_t dtype) {
    inputs.push_back(encode(values, dtype));
    if (!values.empty()) tensors.add_input<kField>(inputs.back());
  };
  add_input.operator()<&B::hidden>(data.hidden, problem.dtype.hidden);
  add_input.operator()<&B::classifier>(data.classifier, problem.dtype.classifier);
  add_input.operator()<&B::bias>(data.bias, problem.dtype.bias);
  add_input.operator()<&B::class_weight>(data.class_weight, stats);
  add_input.operator()<&B::token_weight>(data.token_weight, stats);
  add_input.operator()<&B::temperature>(data.temperature, stats);
  tensors.add_input<&B::targets>(std::as_bytes(std::span(data.targets)));

  struct Output {
    std::vector<double>* to;
    RunTensor::SetPointer set;
    int64_t count;
    int32_t dtype;
  };
  const auto run = [&](RunTensors all, const std::vector<Output>& outputs) {
    std::vector<std::vector<std::byte>> bytes;
    for (const Output& output : outputs) {
      // Never computed bytes would show as NaN.
      bytes.emplace_back(static_cast<size_t>(output.count * dtype_bytes(output.dtype)), std::byte{0xff});
      if (output.count > 0) all.add_output(output.set, bytes.back());
    }
    runner.run(problem, all);
    for (size_t i = 0; i < outputs.size(); ++i) *outputs[i].to = decode(bytes[i], outputs[i].dtype);
  };
  CheckOutputs out;
  out.argmax.resize(static_cast<size_t>(problem.tokens));
  RunTensors all = tensors;
  all.add_output(set_pointer<&B::argmax>, std::as_writable_bytes(std::span(out.argmax)));
  const int64_t rows = problem.tokens;
  run(all,
      {{&out.loss, set_pointer<&B::loss>, 1, stats},
       {&out.nll, set_pointer<&B::nll>, rows, stats},
       {&out.lse, set_pointer<&B::lse>, rows, stats},
       {&out.entropy, set_pointer<&B::entropy>, rows, stats},
       {&out.d_hidden, set_pointer<&B::d_hidden>, problem.has.d_hidden * rows * problem.hidden,
        problem.dtype.d_hidden},
       {&out.d_classifier, set_pointer<&B::d_classifier>,
        problem.has.d_classifier * problem.vocab * problem.hidden, problem.dtype.d_classifier},
       {&out.d_bias, set_pointer<&B::d_bias>, problem.has.d_bias * problem.vocab, problem.dtype.d_bias}});
  // The losses of the rows come from a forward pass without a reduction.
  problem.pass = LOGITLESS_FORWARD;
  problem.reduction = LOGITLESS_REDUCTION_NONE;
  problem.num_items = 0;
  problem.has.entropy = problem.has.argmax = 0;
  problem.has.d_hidden = problem.has.d_classifier = problem.has.d_bias = 0;
  problem.max_workspace_bytes = 0;
  run(tensors, {{&out.row_loss, set_pointer<&B::loss>, rows, stats}});
  return out;
}

}  // namespace logitless::cli
