#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <map>
#include <memory>
#include <string_view>

#include "commands/check.h"
#include "commands/options.h"
#include "commands/run.h"
#include "support/format.h"
#include "support/progress.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

constexpr const char* kOracle = "reference";
constexpr const char* kOnDevices = "cuda";
constexpr const char* kPortable = "portable";

struct CheckOptions {
  std::string device = "cpu";
  bool full = false;
  bool verbose = false;
};

struct CaseResult {
  std::string backend;
  std::string name;
  size_t workspace_bytes = 0;
  std::vector<CheckedOutput> outputs;
  bool passed() const {
    return std::all_of(outputs.begin(), outputs.end(), [](const CheckedOutput& o) { return o.passed(); });
  }
};

// Returns the backends to check: the one of --backend, or all usable ones except the reference, which is the
// oracle. On a device these are its best kernels and, if these serve only 16-bit operands, also the portable
// ones.
std::vector<std::string> chosen_backends(const GlobalOptions& globals, const DeviceChoice& device) {
  if (!globals.backend.empty()) return {globals.backend};
  std::vector<std::string> names;
  if (!device.is_host()) {
    names.emplace_back(kOnDevices);
    Problem problem;
    problem.tokens = problem.vocab = problem.hidden = 256;
    problem.dtype.hidden = problem.dtype.weight = LOGITLESS_BF16;
    const Plan plan(make_context(globals, kOnDevices, device), problem);
    if (std::string_view(plan.info().engine) != kPortable)
      names.push_back(std::string(kOnDevices) + ":" + kPortable);
    return names;
  }
  for (const BackendInfo& backend : backends()) {
    if (backend.why_unavailable.empty() && backend.name != kOracle && backend.name != kOnDevices)
      names.push_back(backend.name);
  }
  if (names.empty()) names.push_back(kOracle);
  return names;
}

// Returns a number about proportional to a case's time, including the fixed part of small cases.
int64_t work_of(const CheckCase& c) {
  return c.problem.tokens * c.problem.vocab * c.problem.hidden + (int64_t{1} << 18);
}

// A backend's context and its runner, which refers to it.
struct Engine {
  Engine(const GlobalOptions& globals, const std::string& backend, const DeviceChoice& device)
      : name(backend), context(make_context(globals, backend, device)), runner(context, device.ordinal) {}
  std::string name;
  Context context;
  Runner runner;
};

std::vector<CaseResult> check_all(const GlobalOptions& globals, const DeviceChoice& device,
                                  const std::vector<CheckCase>& grid) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (const std::string& name : chosen_backends(globals, device))
    engines.push_back(std::make_unique<Engine>(globals, name, device));
  Engine oracle(globals, kOracle, {});
  const bool rounds_dz = !device.is_host();
  std::vector<CaseResult> results;
  int64_t work = 0;
  for (const CheckCase& c : grid) work += work_of(c);
  Progress progress(globals.quiet, "check", work);
  int64_t done = 0;
  for (const CheckCase& c : grid) {
    const CheckData data(c);
    const CheckOutputs truth = run_case(oracle.runner, c, data, true, 0);
    for (const auto& engine : engines) {
      for (const size_t workspace : workspaces_of(engine->context, c)) {
        const CheckOutputs got = run_case(engine->runner, c, data, false, workspace);
        results.push_back({engine->name, c.name(), workspace, compare(c, data, truth, got, rounds_dz)});
      }
    }
    done += work_of(c);
    progress.update(done, c.name());
  }
  return results;
}

// Returns the worst error of each backend's outputs as a share of its bound.
ordered_json worst_json(const std::vector<CaseResult>& results) {
  std::map<std::pair<std::string, std::string>, ordered_json> worst;
  for (const CaseResult& result : results) {
    for (const CheckedOutput& output : result.outputs) {
      const bool is_none = output.passed() && output.error == 0;
      const double ratio = is_none ? 0 : output.bound > 0 ? output.error / output.bound : HUGE_VAL;
      ordered_json& entry = worst[{result.backend, output.name}];
      if (!entry.is_null() && ratio <= entry["error_over_bound"]) continue;
      entry = {{"backend", result.backend}, {"output", output.name}, {"error_over_bound", ratio},
               {"error", output.error},     {"bound", output.bound}, {"case", result.name}};
    }
  }
  ordered_json list = ordered_json::array();
  for (const auto& [key, entry] : worst) list.push_back(entry);
  return list;
}

ordered_json result_json(const CaseResult& result) {
  ordered_json outputs;
  for (const CheckedOutput& output : result.outputs) {
    outputs[output.name] = {{"error", output.error}, {"bound", output.bound}, {"passed", output.passed()}};
  }
  return {{"backend", result.backend},
          {"case", result.name},
          {"workspace_bytes", result.workspace_bytes},
          {"passed", result.passed()},
          {"outputs", outputs}};
}

void run_check(const CheckOptions& options, const GlobalOptions& globals) {
  const auto start = std::chrono::steady_clock::now();
  const DeviceChoice device = parse_device(globals, options.device);
  const std::vector<CaseResult> results = check_all(globals, device, check_grid(options.full));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  int64_t failed = 0;
  ordered_json cases = ordered_json::array();
  for (const CaseResult& result : results) {
    failed += result.passed() ? 0 : 1;
    if (globals.json || options.verbose || !result.passed()) cases.push_back(result_json(result));
  }
  const ordered_json worst = worst_json(results);
  if (globals.json) {
    print_json({{"passed", failed == 0},
                {"runs", results.size()},
                {"failed", failed},
                {"seconds", seconds},
                {"worst", worst},
                {"cases", cases}});
  } else {
    print_report(cases, false);
    std::cout
        << table_text(worst, {"backend", "output", "error_over_bound", "error", "bound", "case"}) << "\n"
        << static_cast<int64_t>(results.size()) - failed << " of " << results.size()
        << " runs within their bounds, in " << format_seconds(seconds)
        << "\nerror: 2-norm of the difference to float64. bound: its limit, from the roundings of sums and "
           "outputs and the\nnorms of operands. A GPU also rounds gradients of logits to the dtype of 16-bit "
           "operands.\n";
  }
  if (failed != 0) {
    throw std::runtime_error("check: " + std::to_string(failed) + " of " + std::to_string(results.size()) +
                             " runs exceed their error bound");
  }
}

}  // namespace

void add_check_command(CLI::App& app, const GlobalOptions& globals) {
  CLI::App* command =
      app.add_subcommand("check", "Compare this machine's results with float64, over a grid of problems");
  const auto options = std::make_shared<CheckOptions>();
  command
      ->add_option("--device", options->device, "Device to check: cpu, or cuda:N for that device's kernels")
      ->capture_default_str();
  command->add_flag("--full", options->full,
                    "Also check larger shapes: four minutes on two cores instead of half a minute");
  command->add_flag("--verbose,-v", options->verbose, "Show every run, not only those that fail");
  command->footer(
      "\nEvery usable backend (or the one of --backend) runs shapes x dtypes x options with each of its "
      "plans.\n"
      "Compared are loss, lse, nll, entropy, argmax and all gradients. Exit code 1: a result exceeds its "
      "bound.\n"
      "\n"
      "Examples:\n"
      "  logitless check\n"
      "  logitless --backend cpu:avx2 check --verbose\n"
      "  logitless check --device cuda:0\n"
      "  logitless --json check | jq '.worst'\n");
  command->callback([options, &globals] { run_check(*options, globals); });
}

}  // namespace logitless::cli
