#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <string_view>
#include <type_traits>

#include "commands/check.h"
#include "commands/options.h"
#include "commands/run.h"

namespace logitless::cli {
namespace {

using Sizes = std::array<int64_t, 3>;
// Sizes: one element; less than any vector; odd; just past round sizes; round.
constexpr std::array<Sizes, 6> kShapes{
    {{1, 1, 1}, {3, 5, 2}, {17, 131, 33}, {65, 257, 129}, {64, 1024, 64}, {253, 770, 48}}};
constexpr std::array<Sizes, 3> kLargeShapes{{{300, 5003, 257}, {40, 20011, 512}, {1030, 2049, 96}}};

constexpr std::array<std::array<logitless_dtype, 2>, 4> kPairs{{{LOGITLESS_F32, LOGITLESS_F32},
                                                                {LOGITLESS_BF16, LOGITLESS_BF16},
                                                                {LOGITLESS_F16, LOGITLESS_F16},
                                                                {LOGITLESS_BF16, LOGITLESS_F32}}};

// Draws the real-valued options of options.def: all of them, or the one of this name; none for "".
constexpr const char* kAll = "all";
void draw_options(CheckCase& c, std::string_view name) {
  Problem& p = c.problem;
  std::mt19937_64 random(
      static_cast<uint64_t>(p.tokens * 1000003 + p.vocab * 1009 + p.hidden + p.dtype.hidden));
  for_each_option(p, [&](const OptionLine& line, auto& value) {
    if constexpr (std::is_same_v<decltype(value), double&>) {
      const double size = std::exp2(-std::uniform_real_distribution<double>(0, 3)(random));
      const double sign = line.lowest < 0 && random() % 2 == 0 ? -1 : 1;
      if (name == line.name || name == kAll) value = std::clamp(sign * size, line.lowest, line.highest);
    }
  });
}

struct OptionSet {
  const char* name;
  const char* drawn;
  void (*set)(CheckCase& c, Problem& p);
};
constexpr std::array kSets{
    OptionSet{"plain", "", [](CheckCase&, Problem&) {}},
    OptionSet{"bias", "", [](CheckCase&, Problem& p) { p.has.bias = 1; }},
    OptionSet{"token-temperature", "",
              [](CheckCase& c, Problem& p) { p.has.temperature = c.ignored_rows = true; }},
    OptionSet{"class-weight", kAll, [](CheckCase&, Problem& p) { p.has.class_weight = 1; }},
    OptionSet{"token-weight", "", [](CheckCase&, Problem& p) { p.has.token_weight = 1; }},
    OptionSet{"ignored-rows", "", [](CheckCase& c, Problem&) { c.ignored_rows = true; }},
    OptionSet{"shift", "", [](CheckCase&, Problem& p) { p.shift = 2; }},
    OptionSet{"sum", "", [](CheckCase&, Problem& p) { p.reduction = LOGITLESS_REDUCTION_SUM; }},
    OptionSet{"large-logits", "", [](CheckCase& c, Problem&) { c.logit_std = 30; }},
    OptionSet{"frozen-hidden", "", [](CheckCase&, Problem& p) { p.has.d_hidden = 0; }},
    OptionSet{"frozen-weight", "", [](CheckCase&, Problem& p) { p.has.d_weight = 0; }},
    OptionSet{"all", kAll, [](CheckCase& c, Problem& p) {
                p.temperature = p.shift = 1;
                p.has.bias = p.has.class_weight = p.has.token_weight = p.has.temperature = c.ignored_rows =
                    true;
              }}};

// Returns the sets above, and one set for each real-valued option, without those of sparsified gradients.
std::vector<OptionSet> option_sets() {
  std::vector<OptionSet> sets(kSets.begin(), kSets.end());
  Problem problem;
  for_each_option(problem, [&](const OptionLine& line, auto& value) {
    if (std::is_same_v<decltype(value), double&> && line.group != "SPARSIFIED")
      sets.push_back({line.name, line.name, [](CheckCase&, Problem&) {}});
  });
  return sets;
}

// Draws numbers and rounds them to the dtype.
template <class Distribution>
std::vector<double> numbers(std::mt19937_64& random, int64_t count, Distribution distribution,
                            int32_t dtype) {
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = distribution(random);
  return decode(encode(values, dtype), dtype);
}

Problem problem_of(const CheckCase& c, size_t budget) {
  Problem problem = c.problem;
  problem.has.d_bias = problem.has.bias && problem.has.d_weight;
  problem.max_workspace_bytes = budget;
  return problem;
}

}  // namespace

std::string CheckCase::name() const {
  std::string text = std::to_string(problem.tokens) + "x" + std::to_string(problem.vocab) + "x" +
                     std::to_string(problem.hidden) + " " + dtype_text(problem.dtype.hidden);
  if (problem.dtype.weight != problem.dtype.hidden)
    text += std::string("/") + dtype_text(problem.dtype.weight);
  return text + " " + options;
}

CheckCase make_case(std::string options, const Sizes& sizes, logitless_dtype hidden, logitless_dtype weight) {
  CheckCase c;
  c.options = std::move(options);
  Problem& p = c.problem;
  p.pass = LOGITLESS_FORWARD_BACKWARD;
  p.reduction = LOGITLESS_REDUCTION_MEAN;
  p.tokens = sizes[0], p.vocab = sizes[1], p.hidden = sizes[2];
  p.dtype.hidden = p.dtype.d_hidden = hidden;
  p.dtype.weight = p.dtype.d_weight = p.dtype.bias = p.dtype.d_bias = weight;
  p.has.entropy = p.has.argmax = p.has.d_hidden = p.has.d_weight = 1;
  return c;
}

std::vector<CheckCase> check_grid(bool full) {
  std::vector<CheckCase> grid;
  const auto add = [&](const Sizes& sizes, const OptionSet& options) {
    for (const auto& [hidden, weight] : kPairs) {
      CheckCase& c = grid.emplace_back(make_case(options.name, sizes, hidden, weight));
      draw_options(c, options.drawn);
      options.set(c, c.problem);
    }
  };
  for (const Sizes& sizes : kShapes) {
    for (const OptionSet& options : option_sets()) add(sizes, options);
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
  weight = numbers(random, p.vocab * p.hidden,
                   Normal(0, c.logit_std / std::sqrt(static_cast<double>(p.hidden))), p.dtype.weight);
  if (p.has.bias) bias = numbers(random, p.vocab, Normal(0, 1), p.dtype.bias);
  const std::uniform_real_distribution<double> positive(0.25, 2);
  if (p.has.class_weight) class_weight = numbers(random, p.vocab, positive, LOGITLESS_F32);
  if (p.has.token_weight) token_weight = numbers(random, p.tokens, positive, LOGITLESS_F32);
  if (p.has.temperature) temperature = numbers(random, p.tokens, positive, LOGITLESS_F32);
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
  for (int32_t* dtype : {&problem.dtype.hidden, &problem.dtype.weight, &problem.dtype.bias,
                         &problem.dtype.d_hidden, &problem.dtype.d_weight, &problem.dtype.d_bias}) {
    if (float64) *dtype = LOGITLESS_F64;
  }
  const int32_t stats = float64 ? LOGITLESS_F64 : LOGITLESS_F32;
  std::vector<std::vector<std::byte>> bytes;  // data of the inputs
  RunTensors inputs{{LOGITLESS_TENSOR_TARGETS, std::as_bytes(std::span(data.targets))}};
  const auto add_input = [&](logitless_tensor_id id, const std::vector<double>& values, int32_t dtype) {
    if (!values.empty()) inputs.emplace_back(id, bytes.emplace_back(encode(values, dtype)));
  };
  add_input(LOGITLESS_TENSOR_HIDDEN, data.hidden, problem.dtype.hidden);
  add_input(LOGITLESS_TENSOR_WEIGHT, data.weight, problem.dtype.weight);
  add_input(LOGITLESS_TENSOR_BIAS, data.bias, problem.dtype.bias);
  add_input(LOGITLESS_TENSOR_CLASS_WEIGHT, data.class_weight, stats);
  add_input(LOGITLESS_TENSOR_TOKEN_WEIGHT, data.token_weight, stats);
  add_input(LOGITLESS_TENSOR_TEMPERATURE, data.temperature, stats);

  struct Output {
    logitless_tensor_id id;
    std::vector<double>* to;
    int64_t count;
    int32_t dtype;
  };
  const auto run = [&](RunTensors tensors, const std::vector<Output>& outputs) {
    std::vector<std::vector<std::byte>> made;
    for (const Output& output : outputs) {
      // Bytes that are never computed would show as NaN.
      made.emplace_back(static_cast<size_t>(output.count * dtype_bytes(output.dtype)), std::byte{0xff});
      tensors.emplace_back(output.id, made.back());
    }
    runner.run(problem, tensors);
    for (size_t i = 0; i < outputs.size(); ++i) *outputs[i].to = decode(made[i], outputs[i].dtype);
  };
  CheckOutputs out;
  out.argmax.resize(static_cast<size_t>(problem.tokens));
  RunTensors tensors = inputs;
  tensors.emplace_back(LOGITLESS_TENSOR_ARGMAX, std::as_bytes(std::span(out.argmax)));
  const int64_t rows = problem.tokens;
  const Problem::Has& has = problem.has;
  const Problem::Dtypes& dtype = problem.dtype;
  run(tensors,
      {{LOGITLESS_TENSOR_LOSS, &out.loss, 1, stats},
       {LOGITLESS_TENSOR_NLL, &out.nll, rows, stats},
       {LOGITLESS_TENSOR_LSE, &out.lse, rows, stats},
       {LOGITLESS_TENSOR_ENTROPY, &out.entropy, rows, stats},
       {LOGITLESS_TENSOR_D_HIDDEN, &out.d_hidden, has.d_hidden * rows * problem.hidden, dtype.d_hidden},
       {LOGITLESS_TENSOR_D_WEIGHT, &out.d_weight, has.d_weight * problem.vocab * problem.hidden,
        dtype.d_weight},
       {LOGITLESS_TENSOR_D_BIAS, &out.d_bias, has.d_bias * problem.vocab, dtype.d_bias}});
  // The losses of the rows come from a second forward pass, without a reduction.
  problem.pass = LOGITLESS_FORWARD;
  problem.reduction = LOGITLESS_REDUCTION_NONE;
  problem.num_items = 0;
  problem.has = {};
  problem.max_workspace_bytes = 0;
  run(inputs, {{LOGITLESS_TENSOR_LOSS, &out.row_loss, rows, stats}});
  return out;
}

}  // namespace logitless::cli
