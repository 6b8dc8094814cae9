#include "commands/plan.h"

#include <algorithm>
#include <array>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "support/format.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

struct Word {
  const char* text;     // the word in the column "plan" or in the configuration, or its beginning
  const char* meaning;  // its meaning there
};

// docs/budgets.md, "Read a plan", explains plans at length.
constexpr std::array kWords{
    Word{"whole", "keeps the exponentials of all logits from the loss to the gradients: 3 F"},
    Word{"token_chunks", "keeps the exponentials of some tokens at a time: 3 F"},
    Word{"vocab_chunks", "keeps the exponentials of some columns, or none; computes the other logits again"},
    Word{"sparsified", "gradients from drawn elements: unbiased, so their mean is the exact gradient"},
    Word{"forward", "the loss only: 1 F"},
    Word{"sm90 ping-pong", "Hopper's kernels; warpgroups take turns at tiles of 128 tokens x 192 columns"},
    Word{"sm90 256x192", "Hopper's kernels; warpgroups share a tile of 256 tokens x 192 columns"},
    Word{"mma 256x192",
         "fused kernels for compute capability 8.0 and newer; tiles of 256 tokens x 192 columns"},
    Word{"logits of e4m3 numbers", "rows of both operands are rounded to 8 bits for the logits alone"},
    Word{"rows in place", "hidden states are read where they are"},
    Word{"rows in d_hidden", "tokens that count are gathered in the memory of their gradient"},
    Word{"rows copied", "tokens that count are gathered in the workspace"},
    Word{"weight copied", "windows of the weight are converted or padded in the workspace"},
    Word{"d_weight rounded",
         "each chunk of tokens adds to a weight gradient in the weight's dtype and rounds it; one chunk more "
         "must save 4% of the time"},
    Word{"portable",
         "kernels for every device of the kind: products by cuBLASLt, or by the compiler's vectors"},
    Word{"blocks ", "tokens x columns whose float32 logits cuBLASLt computes at one time"},
    Word{"avx512_bf16", "AVX-512 with its bf16 dot product, and tiles of tokens x columns in its registers"},
    Word{"avx512 ", "AVX-512, and tiles of tokens x columns in its registers"},
    Word{"avx2 ", "AVX2, and tiles of tokens x columns in its registers"},
    Word{", kept ", "blocks of columns whose exponentials are kept, of all blocks"},
    Word{"windows", "blocks between merges of statistics; windows of gradients at once x blocks of each"},
    Word{", block ", "columns that a thread computes at one time"},
    Word{"lists of", "the most elements that a row of the lists can hold"},
    Word{"d_weight after all rows",
         "the weight's gradient has a pass of its own, which costs one more product"},
    Word{"less scratch", "like the plan above it, with less room for the sums of products"},
};

// Removes the characters that only distinguish the word from other words.
std::string label_of(const Word& word) {
  const std::string_view text = word.text;
  const size_t first = text.find_first_not_of(", ");
  return std::string(text.substr(first, text.find_last_not_of(' ') + 1 - first));
}

std::string columns_text(const ordered_json& columns) {
  return columns == 0 ? "-" : format_count(columns);
}

std::string text_of(const ordered_json& facts, const char* key) {
  return facts[key];
}

// Prints a line, broken between words if it is longer than most terminals are wide.
void print_line(const std::string& text) {
  constexpr size_t kColumns = 100;
  size_t used = 0;
  std::istringstream words(text);
  for (std::string word; words >> word; used += word.size() + 1) {
    const bool breaks = used != 0 && used + word.size() > kColumns;
    if (breaks) used = 2;
    std::cout << (breaks ? "\n  " : used != 0 ? " " : "") << word;
  }
  std::cout << "\n";
}

void print_table(const ordered_json& plans, bool verbose) {
  Table table({"  plan", "workspace", "cost", "time", "fits", "tokens", "columns", "kept"});
  for (const auto& plan : plans) {
    table.add({std::string(plan["chosen"] ? "* " : "  ") + text_of(plan, "plan"),
               format_budget(plan["workspace_bytes"]), format_number(plan["cost_matmuls"], 3) + " F",
               format_seconds(plan["predicted_seconds"]) + (plan["slow"] ? " !" : ""),
               plan["fits"] ? "yes" : "no", columns_text(plan["token_chunk"]),
               columns_text(plan["vocab_window"]), columns_text(plan["cached_columns"])});
  }
  std::istringstream rows(table.text());
  std::string row;
  for (size_t i = 0; std::getline(rows, row); ++i) {
    std::cout << row << "\n";
    if (verbose && i > 0) std::cout << "    " << text_of(plans[i - 1], "config") << "\n";
  }
}

void print_chosen(const ordered_json& result) {
  const auto& problem = result["problem"];
  const auto& plan = result["chosen"];
  if (plan.is_null()) {
    print_line("No plan fits the budget of " + format_budget(problem["budget_bytes"]) + ".");
    return;
  }
  const bool has_gradients = problem["gradients"];
  const double workspace = plan["workspace_bytes"];
  const double held = result["materialized"][has_gradients ? "logits_and_gradient_bytes" : "logits_bytes"];
  print_line("The chosen plan (*) is " + text_of(plan, "plan") + ": " + format_budget(workspace) +
             " of workspace, " + format_seconds(plan["predicted_seconds"]) + " (predicted), " +
             format_number(plan["cost_matmuls"], 3) + " F.");
  print_line(std::string("The float32 logits ") + (has_gradients ? "and their gradient " : "") + "take " +
             format_bytes(held) +
             (workspace > held ? ", which is less: they are small."
              : workspace > 0  ? ", " + format_number(held / workspace, 3) + " times as much."
                               : "."));
}

constexpr double kSlow = 10;
constexpr const char* kRounds = "d_weight rounded";
constexpr const char* kLarger = "the default does not spend so much memory on so little time";

// Returns the chosen plan of a list; its end if none fits.
ordered_json::const_iterator chosen_of(const ordered_json& plans) {
  return std::find_if(plans.begin(), plans.end(), [](const auto& plan) { return plan["chosen"] == true; });
}

// Returns the number of chunks of tokens after the first, each of which rounds the weight's gradient once
// more.
int64_t roundings_of(const ordered_json& plan, int64_t tokens) {
  const int64_t chunk = plan["token_chunk"];
  const bool rounds = text_of(plan, "config").find(kRounds) != std::string::npos;
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
    return "it rounds the weight's gradient " +
           (more == 1 ? std::string("once more, which must save 4% of the time")
                      : std::to_string(more) + " times more, each of which must save 4%");
  }
  return "the search for a smaller budget, which tries other sizes, finds it: --budget " +
         std::to_string(plan["workspace_bytes"].get<uint64_t>());
}

bool look_alike(const ordered_json& plan, const ordered_json& other) {
  constexpr std::array kShown{"plan", "token_chunk", "vocab_window", "cached_columns", "config"};
  return std::all_of(kShown.begin(), kShown.end(), [&](const char* key) { return plan[key] == other[key]; });
}

double seconds_of(const ordered_json& plan) {
  return plan["predicted_seconds"];
}

// Returns the share of its time that another plan saves.
std::string saved(const ordered_json& plan, const ordered_json& of) {
  return format_number(100 * (1 - seconds_of(plan) / seconds_of(of)), 2) + "%";
}

std::string named(const ordered_json& plan) {
  return text_of(plan, "plan") + " of " + format_budget(plan["workspace_bytes"]);
}

// Returns the reason for the chosen plan, and the saving of the fastest one.
std::string choice_text(const ordered_json& chosen, const ordered_json& fastest, const Problem& problem) {
  std::string text = "chosen (*): " + text_of(chosen, "choice");
  if (!is_default(problem) || fastest["chosen"] == true) return text;
  return text + "; --budget fastest takes " + named(fastest) + " and " + saved(fastest, chosen) +
         " less time";
}

}  // namespace

void add_notes(ordered_json& plans, const Problem& problem) {
  // The loop begins at the last plan, so that those before are still unchanged.
  for (auto plan = plans.end(); plan != plans.begin();) {
    --plan;
    if (std::any_of(plans.begin(), plan, [&](const auto& other) { return look_alike(*plan, other); }))
      (*plan)["config"] = text_of(*plan, "config") + ", less scratch";
  }
  const auto chosen = chosen_of(plans);
  for (ordered_json& plan : plans) {
    plan["slow"] = seconds_of(plan) > kSlow * seconds_of(plans.front());
    plan["why_not"] = chosen == plans.end() ? "" : why_not(plan, *chosen, problem);
  }
}

ordered_json notes_of(const ordered_json& plans, const Problem& problem) {
  const auto any = [&](const auto& holds) { return std::any_of(plans.begin(), plans.end(), holds); };
  const auto is_sparsified = [](const auto& plan) { return plan["plan"] == "sparsified"; };
  const bool wants_sparsified = problem.gradient != LOGITLESS_EXACT;
  ordered_json notes = ordered_json::array();
  const auto chosen = chosen_of(plans);
  if (chosen != plans.end()) notes.push_back(choice_text(*chosen, plans.front(), problem));
  for (const auto& plan : plans) {
    const std::string why = plan["why_not"];
    if (why.empty() || why == kLarger) continue;  // the first note says so for the fastest
    notes.push_back("not chosen though predicted to take " + saved(plan, *chosen) + " less: " + named(plan) +
                    "; " + why);
  }
  if (wants_sparsified && any([&](const auto& plan) { return !is_sparsified(plan); })) {
    notes.push_back(
        "plans that are not sparsified make exact gradients; they are chosen if sparsification does not fit "
        "the budget or would be no faster on a flat softmax");
  }
  if (wants_sparsified && any(is_sparsified)) {
    notes.push_back(
        "sparsified gradients are unbiased but noisy in each step: training from random weights ended as "
        "with exact ones; fine-tuning of 100 steps at 2^-9 ended 0.029 nats above, and more with few labels; "
        "docs/sparsified.md says when not to use them");
  }
  if (any([](const auto& plan) { return plan["slow"] == true; })) {
    notes.push_back("!: more than " + format_number(kSlow) + " times the time of the fastest plan listed");
  }
  if (chosen != plans.end() && (*chosen)["slow"] == true) {
    const ordered_json* better = nullptr;  // smallest plan that is not slow
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
    return {{"measured", false}, {"basis", "unmeasured predictions, from a rough rate of one thread"}};
  }
  std::string name = device.model;
  if (name.empty()) {
    const std::vector<DeviceInfo> here = devices();
    const auto at = static_cast<size_t>(device.ordinal);
    if (at < here.size()) {
      name = here[at].name;
      if (const std::string record = here[at].record; !record.empty()) {
        return {{"measured", true},
                {"basis", "predicted from rates that were measured, device record " + record}};
      }
    }
  }
  const bool is_h200 = name == "h200" || name.find("H200") != std::string::npos;
  return {
      {"measured", is_h200},
      {"basis",
       is_h200
           ? "predicted from times of these kernels on an H200, call after call; a call after idle is faster"
           : "unmeasured predictions: these kernels were not timed on this device; scaled from an H200's"}};
}

ordered_json words_of(const ordered_json& plans) {
  ordered_json words = ordered_json::array();
  for (const Word& word : kWords) {
    const bool is_there = std::any_of(plans.begin(), plans.end(), [&](const auto& plan) {
      return plan["plan"] == word.text || text_of(plan, "config").find(word.text) != std::string::npos;
    });
    if (is_there) words.push_back({{"word", label_of(word)}, {"meaning", word.meaning}});
  }
  return words;
}

void print_plans(const ordered_json& result, const std::string& model, const std::string& taken,
                 bool verbose) {
  const auto& problem = result["problem"];
  const auto& plans = result["plans"];
  print_line((model.empty() ? "" : model + ": ") + format_count(problem["tokens"]) + " tokens, vocabulary " +
             format_count(problem["vocab"]) + ", hidden " + format_count(problem["hidden"]) + ", " +
             text_of(problem, "dtype") +
             (!problem["gradients"]            ? ", loss only"
              : problem["gradient"] == "exact" ? ", loss and gradients"
                                               : ", loss and sparsified gradients") +
             ", on " + text_of(result, "device"));
  if (!taken.empty()) print_line("taken: " + taken);
  std::cout << "\n";
  print_chosen(result);
  std::cout << "\n";
  print_table(plans, verbose);
  std::cout << "\n";
  print_line("tokens, columns: computed at one time; kept: columns whose exponentials the loss keeps");
  for (const auto& entry : result["words"]) {
    const bool is_kind = std::any_of(plans.begin(), plans.end(),
                                     [&](const auto& plan) { return plan["plan"] == entry["word"]; });
    if (verbose || is_kind) {
      print_line(text_of(entry, "word") + ": " + text_of(entry, "meaning"));
    }
  }
  for (const auto& note : result["notes"]) print_line(note.get<std::string>());
  const auto& any = plans.front();
  std::cout << "\n";
  print_line("kernels: " + text_of(any, "backend") + ", " + text_of(any, "engine") + " (" +
             text_of(any, "reason") + ")");
  print_line("times: " + text_of(result["times"], "basis"));
  print_line("F = 2 x tokens x vocab x hidden = " + format_number(result["f_flop"], 4) + " FLOP");
  print_line("budget: " + (problem["budget_bytes"] == 0 ? "none" : format_budget(problem["budget_bytes"])) +
             ", the smallest that works: " + format_budget(result["smallest_budget_bytes"]) + " (" +
             std::to_string(result["smallest_budget_bytes"].get<uint64_t>()) + " bytes)");
  if (!verbose) print_line("-v shows each plan's kernels, and explains them");
}

}  // namespace logitless::cli
