#include "commands/plan.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "support/format.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

constexpr double kSlow = 10;
constexpr const char* kRounds = "dC rounded";
constexpr const char* kLarger = "it takes more memory than the default gives for so little time";

// The chosen plan of a list; its end where none fits.
ordered_json::const_iterator chosen_of(const ordered_json& plans) {
  return std::find_if(plans.begin(), plans.end(), [](const auto& plan) { return plan["chosen"] == true; });
}

// Chunks of tokens after the first, each of which rounds the classifier's gradient once more.
int64_t roundings_of(const ordered_json& plan, int64_t tokens) {
  const int64_t chunk = plan["token_chunk"];
  const bool rounds = plan["config"].get<std::string>().find(kRounds) != std::string::npos;
  return rounds && chunk > 0 ? (tokens + chunk - 1) / chunk - 1 : 0;
}

bool is_default(const Problem& problem) {
  return problem.max_workspace_bytes == 0;
}

std::string why_not(const ordered_json& plan, const ordered_json& chosen, const Problem& problem) {
  const double seconds = plan["predicted_seconds"], taken = chosen["predicted_seconds"];
  if (plan["fits"] == false || plan["chosen"] == true || seconds >= taken) return "";
  const bool is_larger = plan["workspace_bytes"] > chosen["workspace_bytes"];
  if (is_larger && is_default(problem)) return kLarger;
  const int64_t more = roundings_of(plan, problem.tokens) - roundings_of(chosen, problem.tokens);
  if (more > 0) {
    return "it rounds the classifier's gradient " +
           (more == 1 ? std::string("once more, which must save 4% of the time")
                      : std::to_string(more) + " times more, each of which must save 4%");
  }
  return "the search for a smaller budget, which tries other sizes, finds it: --budget " +
         std::to_string(plan["workspace_bytes"].get<uint64_t>());
}

bool look_alike(const ordered_json& plan, const ordered_json& other) {
  constexpr std::array kShown{"plan", "token_chunk", "vocab_window", "kept_columns", "config"};
  return std::all_of(kShown.begin(), kShown.end(), [&](const char* key) { return plan[key] == other[key]; });
}

std::string percent(double share) {
  return format_number(100 * share, 2) + "%";
}

std::string named(const ordered_json& plan) {
  return plan["plan"].get<std::string>() + " of " + format_budget(plan["workspace_bytes"].get<double>());
}

// Why the chosen plan was, and what the fastest one would save.
std::string choice_text(const ordered_json& chosen, const ordered_json& fastest, const Problem& problem) {
  std::string text = "chosen (*): " + chosen["choice"].get<std::string>();
  if (!is_default(problem) || fastest["chosen"] == true) return text;
  const double saved =
      1 - fastest["predicted_seconds"].get<double>() / chosen["predicted_seconds"].get<double>();
  return text + "; --budget fastest takes " + named(fastest) + " and " + percent(saved) + " less time";
}

}  // namespace

void add_notes(ordered_json& plans, const Problem& problem) {
  for (auto plan = plans.begin(); plan != plans.end(); ++plan) {
    const bool is_twin =
        std::any_of(plans.begin(), plan, [&](const auto& o) { return look_alike(*plan, o); });
    if (is_twin) (*plan)["less_scratch"] = true;
  }
  const auto chosen = chosen_of(plans);
  for (ordered_json& plan : plans) {
    if (plan.erase("less_scratch") != 0) {
      plan["config"] = plan["config"].get<std::string>() + ", less scratch";
    }
    plan["slow"] =
        plan["predicted_seconds"].get<double>() > kSlow * plans.front()["predicted_seconds"].get<double>();
    plan["why_not"] = chosen == plans.end() ? "" : why_not(plan, *chosen, problem);
  }
}

ordered_json notes_of(const ordered_json& plans, const Problem& problem) {
  const bool is_thinned = problem.gradient != LOGITLESS_EXACT;
  ordered_json notes = ordered_json::array();
  const auto chosen = chosen_of(plans);
  if (chosen != plans.end()) notes.push_back(choice_text(*chosen, plans.front(), problem));
  for (const auto& plan : plans) {
    const std::string why = plan["why_not"];
    if (why.empty() || why == kLarger) continue;  // the first note says so of the fastest
    const double saved =
        1 - plan["predicted_seconds"].get<double>() / (*chosen)["predicted_seconds"].get<double>();
    notes.push_back("not chosen though predicted to take " + percent(saved) + " less: " + named(plan) + "; " +
                    why);
  }
  if (is_thinned &&
      std::any_of(plans.begin(), plans.end(), [](const auto& p) { return p["plan"] != "thinned"; })) {
    notes.push_back(
        "plans that are not thinned make exact gradients; they are taken where thinning does not fit "
        "the budget or would be no faster on a flat softmax");
  }
  if (is_thinned &&
      std::any_of(plans.begin(), plans.end(), [](const auto& p) { return p["plan"] == "thinned"; })) {
    notes.push_back(
        "thinned gradients are right in the mean and noisy in each step: training from random weights "
        "ended as with exact ones, fine-tuning of 100 steps at 2^-9 0.029 nats above, and more with few "
        "labels; docs/thinning.md says when not to use them");
  }
  if (std::any_of(plans.begin(), plans.end(), [](const auto& plan) { return plan["slow"] == true; })) {
    notes.push_back("!: more than " + format_number(kSlow) + " times the time of the fastest plan listed");
  }
  if (chosen != plans.end() && (*chosen)["slow"] == true) {
    const ordered_json* better = nullptr;  // the smallest that is not slow
    for (const auto& plan : plans) {
      if (plan["slow"] == false) better = &plan;
    }
    notes.push_back("warning: the chosen plan is one of these; " + named(*better) + " would take " +
                    format_seconds((*better)["predicted_seconds"]));
  }
  return notes;
}

ordered_json times_json(const ordered_json& plan, const DeviceChoice& device) {
  if (plan["backend"] != "cuda") {
    return {{"measured", false}, {"basis", "unmeasured predictions, from a rough rate of a thread"}};
  }
  std::string name = device.model;
  if (name.empty()) {
    const std::vector<DeviceInfo> here = devices();
    const auto at = static_cast<size_t>(device.ordinal);
    if (at < here.size()) name = here[at].name;
  }
  const bool is_h200 = name == "h200" || name.find("H200") != std::string::npos;
  if (!is_h200) {
    return {{"measured", false},
            {"basis",
             "unmeasured predictions: these kernels were not timed on this device; scaled from an H200's"}};
  }
  return {{"measured", true},
          {"basis",
           "predicted from times of these kernels on an H200, of calls back to back; bursts are shorter"}};
}

}  // namespace logitless::cli
