#include <logitless/logitless.hpp>

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>

#include "commands/plan.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

Problem make_problem(const PlanOptions& options) {
  if (options.vocab.empty() || options.hidden.empty()) {
    throw UsageError("plan: expected --model, or --vocab and --hidden");
  }
  Problem problem = options.problem;
  problem.tokens = parse_count("--tokens", options.tokens);
  problem.vocab = parse_count("--vocab", options.vocab);
  problem.hidden = parse_count("--hidden", options.hidden);
  if (problem.vocab < 1) throw UsageError("--vocab: expected at least 1, got " + options.vocab);
  if (problem.hidden < 1) throw UsageError("--hidden: expected at least 1, got " + options.hidden);
  problem.dtype.hidden = problem.dtype.d_hidden = parse_dtype("--dtype", options.dtype);
  problem.dtype.weight = problem.dtype.hidden;
  if (!options.weight_dtype.empty()) {
    problem.dtype.weight = parse_dtype("--weight-dtype", options.weight_dtype);
  }
  problem.dtype.d_weight = options.accumulate && problem.dtype.weight != LOGITLESS_F64
                               ? static_cast<int32_t>(LOGITLESS_F32)
                               : problem.dtype.weight;
  problem.dtype.bias = problem.dtype.d_bias = problem.dtype.weight;
  if (!options.no_grad) {
    problem.pass = LOGITLESS_FORWARD_BACKWARD;
    problem.has.d_hidden = !options.freeze_hidden;
    problem.has.d_weight = !options.freeze_weight;
    problem.has.d_bias = problem.has.bias && !options.freeze_weight;
    problem.accumulate.d_weight = options.accumulate && !options.freeze_weight;
    if (options.freeze_hidden && options.freeze_weight) {
      throw UsageError("plan: --freeze-hidden and --freeze-weight leave no gradient; use --no-grad");
    }
  }
  return problem;
}

bool is_same(const PlanInfo& plan, const PlanInfo& other) {
  return plan.kind == other.kind && plan.workspace_bytes == other.workspace_bytes;
}

uint64_t least_bytes(const std::vector<PlanInfo>& plans) {
  uint64_t least = UINT64_MAX;
  for (const PlanInfo& plan : plans) least = std::min(least, plan.workspace_bytes);
  return least;
}

// Returns the plans without a budget, within the problem's budget, and within halves of the largest plan's
// bytes down to the smallest budget that works, fastest first. The chosen plan (null: none fits) is among
// them.
std::vector<PlanInfo> all_plans(const Context& context, const Problem& problem, const PlanInfo* chosen) {
  std::vector<PlanInfo> all;
  if (chosen != nullptr) all.push_back(*chosen);
  const auto add_plans_within = [&](uint64_t budget) {
    Problem bounded = problem;
    bounded.max_workspace_bytes = budget;
    const std::vector<PlanInfo> plans = context.plans(bounded);
    all.insert(all.end(), plans.begin(), plans.end());
  };
  add_plans_within(0);
  add_plans_within(1);  // brings the plan that needs the least memory
  if (problem.max_workspace_bytes != 0) add_plans_within(problem.max_workspace_bytes);
  uint64_t most = 0;
  for (const PlanInfo& plan : all) most = std::max(most, plan.workspace_bytes);
  const uint64_t least = least_bytes(all);
  for (uint64_t budget = std::bit_floor(most); budget > least; budget /= 2) add_plans_within(budget);
  std::stable_sort(all.begin(), all.end(), [](const PlanInfo& a, const PlanInfo& b) {
    return std::tie(a.predicted_seconds, a.workspace_bytes) <
           std::tie(b.predicted_seconds, b.workspace_bytes);
  });
  return all;
}

// Returns the plans that show time against memory: each takes at least a tenth less memory than all before.
// The chosen plan and the smallest one are always among them.
std::vector<PlanInfo> useful_plans(const std::vector<PlanInfo>& plans, const PlanInfo* chosen) {
  std::vector<PlanInfo> useful;
  double least = std::numeric_limits<double>::infinity();
  const uint64_t smallest = least_bytes(plans);
  for (const PlanInfo& plan : plans) {
    const auto bytes = static_cast<double>(plan.workspace_bytes);
    const bool is_due = bytes <= 0.9 * least || (chosen != nullptr && is_same(*chosen, plan)) ||
                        (plan.workspace_bytes == smallest && bytes < least);
    if (!is_due || (!useful.empty() && is_same(useful.back(), plan))) continue;
    least = std::min(least, bytes);
    useful.push_back(plan);
  }
  return useful;
}

ordered_json problem_json(const Problem& problem) {
  const bool is_fastest = problem.max_workspace_bytes == LOGITLESS_FASTEST;
  ordered_json out{{"tokens", problem.tokens},
                   {"vocab", problem.vocab},
                   {"hidden", problem.hidden},
                   {"dtype", dtype_text(problem.dtype.hidden)},
                   {"weight_dtype", dtype_text(problem.dtype.weight)},
                   {"gradients", problem.pass != LOGITLESS_FORWARD}};
  out.update(options_json(problem));
  out["budget_bytes"] = is_fastest ? 0 : problem.max_workspace_bytes;
  out["fastest"] = is_fastest;
  return out;
}

void run_plan(PlanOptions options, const GlobalOptions& globals, const CLI::App& command) {
  const PlanModel model = read_plan_model(options, command);
  const Problem problem = make_problem(options);
  const DeviceChoice device = parse_device(globals, options.device, true);
  const Context context = make_context(globals, {}, device);
  std::unique_ptr<PlanInfo> chosen;
  std::string refusal;
  try {
    chosen = std::make_unique<PlanInfo>(Plan(context, problem).info());
  } catch (const Error& error) {
    if (error.status() != LOGITLESS_BUDGET_TOO_SMALL) throw;
    refusal = "--budget: expected " + error.expected + ", got " + error.got;
  }
  const std::vector<PlanInfo> plans = all_plans(context, problem, chosen.get());
  const double elements = static_cast<double>(problem.tokens) * static_cast<double>(problem.vocab);
  ordered_json list = ordered_json::array();
  for (const PlanInfo& plan : useful_plans(plans, chosen.get())) {
    ordered_json entry = plan_json(plan);
    entry["fits"] = problem.max_workspace_bytes == 0 || plan.workspace_bytes <= problem.max_workspace_bytes;
    entry["chosen"] = chosen && is_same(*chosen, plan);
    if (entry["chosen"]) entry["choice"] = chosen->choice;
    list.push_back(entry);
  }
  add_notes(list, problem);
  ordered_json result{
      {"device", options.device},
      {"problem", problem_json(problem)},
      {"f_flop", 2 * elements * static_cast<double>(problem.hidden)},
      {"plans", list},
      {"words", words_of(list)},
      {"notes", notes_of(list, problem)},
      {"times", times_json(list.front(), device)},
      {"chosen", chosen ? plan_json(*chosen) : ordered_json(nullptr)},
      {"smallest_budget_bytes", least_bytes(plans)},
      {"materialized", {{"logits_bytes", 4 * elements}, {"logits_and_gradient_bytes", 8 * elements}}}};
  if (!model.facts.is_null()) result["model"] = model.facts;
  if (globals.json) {
    print_json(result);
  } else {
    print_plans(result, model.name, model.taken, options.verbose);
  }
  if (!refusal.empty()) throw std::runtime_error(refusal);
}

}  // namespace

void add_plan_command(CLI::App& app, const GlobalOptions& globals) {
  CLI::App* command =
      app.add_subcommand("plan", "Show the plans for a head of any size: workspace, cost and time");
  const auto options = std::make_shared<PlanOptions>();
  command->add_option("--model", options->model,
                      "A published model's head (see --list-models), a config.json, or a folder with one. It "
                      "gives the sizes, softcap and scale, and a config's dtype, unless these are given");
  command->add_flag("--list-models", options->list_models, "Show the table of models and exit");
  command->add_flag("--verbose,-v", options->verbose, "Also show each plan's kernels, and explain them");
  command->add_option("--tokens,-N", options->tokens, "Tokens in the batch, such as 8192 or 8Ki")
      ->capture_default_str();
  command->add_option("--vocab,-V", options->vocab, "Vocabulary size: rows of the weight");
  command->add_option("--hidden,-D", options->hidden, "Hidden size: columns of the weight");
  command->add_option("--dtype", options->dtype,
                      "Dtype of hidden and weight: f32, bf16, f16 or f64. Default: that of --model's "
                      "config.json, else bf16");
  command->add_option("--weight-dtype", options->weight_dtype, "Dtype of the weight, if it differs");
  command
      ->add_option("--device", options->device,
                   "Device to plan for: cpu, cuda:N, or a model such as a100, rtx-4090 or h200, which may be "
                   "elsewhere")
      ->capture_default_str();
  command->add_flag("--no-grad", options->no_grad, "Plan for the loss only");
  command->add_flag("--freeze-hidden", options->freeze_hidden, "Compute no gradient of the hidden states");
  command->add_flag("--freeze-weight", options->freeze_weight, "Compute no gradient of the weight");
  command->add_flag("--accumulate", options->accumulate,
                    "Add the weight's gradient to the caller's float32 buffer");
  command->add_flag("--bias", options->problem.has.bias, "The head has a bias");
  command->add_flag("--entropy", options->problem.has.entropy, "Also output each token's entropy");
  add_problem_options(*command, options->problem, false);
  command->footer(
      "\nExamples:\n"
      "  logitless plan --model gemma-2-2b --tokens 8192 --budget 256MiB\n"
      "  logitless plan --model meta-llama/Meta-Llama-3-8B --no-grad\n"
      "  logitless plan --model ~/models/gemma-2-2b/config.json\n"
      "  logitless plan --model gemma-2-2b --gradient sparsified --threshold 2^-9\n"
      "  logitless plan --tokens 2048 --vocab 32768 --hidden 256 --dtype f32 --freeze-hidden\n"
      "  logitless plan --model gemma-2-2b --device h200 --budget 160MiB -v\n"
      "  logitless plan --list-models\n"
      "\n"
      "Costs are in F, the work of one matrix product of the head; exact training needs three. Exit code 1:\n"
      "no plan fits the budget; the message names the smallest budget that works.");
  command->callback([options, &globals, command] {
    if (options->list_models) {
      list_models(globals.json);
    } else {
      run_plan(*options, globals, *command);
    }
  });
}

}  // namespace logitless::cli
