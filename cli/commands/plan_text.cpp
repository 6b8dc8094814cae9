#include "commands/plan.h"

#include <algorithm>
#include <array>
#include <iostream>
#include <sstream>
#include <string_view>

#include "support/format.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

struct Word {
  const char* text;     // as it stands in the column "plan" or in the configuration, or how that begins
  const char* meaning;  // of it there
};

// docs/budgets.md, "Words of a plan", says the same at length.
constexpr std::array kWords{
    Word{"whole", "the exponentials of all logits are kept from the loss to the gradients: 3 F"},
    Word{"token_chunks", "those of some tokens at once: 3 F"},
    Word{"vocab_chunks", "those of some columns, or of none: the other logits are computed again"},
    Word{"thinned", "gradients of drawn elements, whose mean is the exact gradient"},
    Word{"forward", "the loss alone: 1 F"},
    Word{"sm90 ping-pong", "Hopper's kernels; warpgroups take turns at tiles of 128 tokens x 192 columns"},
    Word{"sm90 256x192", "Hopper's kernels; warpgroups share a tile of 256 tokens x 192 columns"},
    Word{"mma 256x192",
         "fused kernels for compute capability 8.0 and newer; tiles of 256 tokens x 192 columns"},
    Word{"rows in place", "hidden states are read where they are"},
    Word{"rows in d_hidden", "tokens that count are gathered where their gradient will be"},
    Word{"rows copied", "tokens that count are gathered in the workspace"},
    Word{"classifier copied", "windows of the classifier are converted or padded in the workspace"},
    Word{"dC rounded",
         "each chunk of tokens adds to a classifier's gradient of its own dtype, which must save 4% of the "
         "time"},
    Word{"portable", "the kernels of any such device: products by cuBLASLt, or by the compiler's vectors"},
    Word{"blocks ", "tokens x columns whose logits cuBLASLt makes at once, in float32"},
    Word{"avx512_bf16", "AVX-512 with its bf16 dot product, and tiles of tokens x columns in its registers"},
    Word{"avx512 ", "AVX-512, and tiles of tokens x columns in its registers"},
    Word{"avx2 ", "AVX2, and tiles of tokens x columns in its registers"},
    Word{", kept ", "blocks of columns whose exponentials are kept, of all"},
    Word{"windows", "blocks between merges of statistics; windows of gradients at once x blocks of each"},
    Word{", block ", "columns that a thread makes at once"},
    Word{"lists of", "the most elements that a row of the lists can hold"},
    Word{"d_classifier after all rows",
         "the classifier's gradient has a pass of its own, for a product more"},
    Word{"less scratch", "like the plan above it, with less room for the products' sums"},
};

// Without what only tells it from other words.
std::string shown(const Word& word) {
  const std::string_view text = word.text;
  const size_t first = text.find_first_not_of(", ");
  return std::string(text.substr(first, text.find_last_not_of(' ') + 1 - first));
}

std::string columns_text(const ordered_json& columns) {
  return columns == 0 ? "-" : format_count(columns);
}

// A line, broken between words where it would be longer than most terminals are wide.
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
    table.add({std::string(plan["chosen"] ? "* " : "  ") + plan["plan"].get<std::string>(),
               format_budget(plan["workspace_bytes"].get<double>()), format_number(plan["cost_f"], 3) + " F",
               format_seconds(plan["predicted_seconds"]) + (plan["slow"] ? " !" : ""),
               plan["fits"] ? "yes" : "no", columns_text(plan["token_chunk"]),
               columns_text(plan["vocab_window"]), columns_text(plan["kept_columns"])});
  }
  std::istringstream rows(table.text());
  std::string row;
  std::getline(rows, row);
  std::cout << row << "\n";
  for (const auto& plan : plans) {
    std::getline(rows, row);
    std::cout << row << "\n";
    if (verbose) std::cout << "    " << plan["config"].get<std::string>() << "\n";
  }
}

void print_chosen(const ordered_json& result) {
  const auto& problem = result["problem"];
  const auto& plan = result["chosen"];
  if (plan.is_null()) {
    print_line("No plan fits the budget of " + format_budget(problem["budget_bytes"].get<double>()) + ".");
    return;
  }
  const bool has_gradients = problem["gradients"];
  const double workspace = plan["workspace_bytes"].get<double>();
  const double held = result["materialized"][has_gradients ? "logits_and_gradient_bytes" : "logits_bytes"];
  print_line("The chosen plan (*) is " + plan["plan"].get<std::string>() + ": " + format_budget(workspace) +
             " of workspace, " + format_seconds(plan["predicted_seconds"]) + " (predicted), " +
             format_number(plan["cost_f"], 3) + " F.");
  print_line(std::string("The float32 logits ") + (has_gradients ? "and their gradient " : "") + "take " +
             format_bytes(held) +
             (workspace > held ? ", which is less: they are small."
              : workspace > 0  ? ", " + format_number(held / workspace, 3) + " times as much."
                               : "."));
}

}  // namespace

ordered_json words_of(const ordered_json& plans) {
  ordered_json words = ordered_json::array();
  for (const Word& word : kWords) {
    const bool is_there = std::any_of(plans.begin(), plans.end(), [&](const auto& plan) {
      return plan["plan"] == word.text ||
             plan["config"].template get<std::string>().find(word.text) != std::string::npos;
    });
    if (is_there) words.push_back({{"word", shown(word)}, {"meaning", word.meaning}});
  }
  return words;
}

void print_plans(const ordered_json& result, const std::string& model, const std::string& taken,
                 bool verbose) {
  const auto& problem = result["problem"];
  const auto& plans = result["plans"];
  print_line((model.empty() ? "" : model + ": ") + format_count(problem["tokens"]) + " tokens, vocabulary " +
             format_count(problem["vocab"]) + ", hidden " + format_count(problem["hidden"]) + ", " +
             problem["dtype"].get<std::string>() +
             (!problem["gradients"]            ? ", loss only"
              : problem["gradient"] == "exact" ? ", loss and gradients"
                                               : ", loss and thinned gradients") +
             ", on " + result["device"].get<std::string>());
  if (!taken.empty()) print_line("taken: " + taken);
  std::cout << "\n";
  print_chosen(result);
  std::cout << "\n";
  print_table(plans, verbose);
  std::cout << "\n";
  print_line("tokens, columns: worked on at once; kept: columns whose exponentials the loss keeps");
  for (const auto& entry : result["words"]) {
    const bool is_kind = std::any_of(plans.begin(), plans.end(),
                                     [&](const auto& plan) { return plan["plan"] == entry["word"]; });
    if (verbose || is_kind) {
      print_line(entry["word"].get<std::string>() + ": " + entry["meaning"].get<std::string>());
    }
  }
  for (const auto& note : result["notes"]) print_line(note.get<std::string>());
  const auto& any = plans.front();
  std::cout << "\n";
  print_line("kernels: " + any["backend"].get<std::string>() + ", " +
             any["implementation"].get<std::string>() + " (" + any["reason"].get<std::string>() + ")");
  print_line("times: " + result["times"]["basis"].get<std::string>());
  print_line("F = 2 x tokens x vocab x hidden = " + format_number(result["f_flop"], 4) + " FLOP");
  print_line("budget: " +
             (problem["budget_bytes"] == 0 ? "none" : format_budget(problem["budget_bytes"].get<double>())) +
             ", the smallest that works: " + format_budget(result["smallest_budget_bytes"].get<double>()) +
             " (" + std::to_string(result["smallest_budget_bytes"].get<uint64_t>()) + " bytes)");
  if (!verbose) print_line("-v shows each plan's kernels");
}

}  // namespace logitless::cli
