#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <logitless/logitless.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "application.h"
#include "io/tensor.h"

namespace logitless::cli {

// A line of options.def.
struct OptionLine {
  std::string_view group;  // the name of its group, and that for people
  const char* title;
  const char* name;
  double lowest, highest;  // of numbers
  const char* values;      // names of a choice, by |; null: no choice
  const char* doc;
};

// Calls visit(line, member of the problem) for each option of the list.
template <class AnyProblem, class Visit>
void for_each_option(AnyProblem&& problem, const Visit& visit) {
  std::string_view group;
  const char* title = nullptr;
#define LOGITLESS_OPTION_GROUP(NAME, text) group = #NAME, title = text;
#define LOGITLESS_OPTION_REAL(name, NAME, default_value, lowest, highest, doc)                              \
  visit(OptionLine{group, title, #name, static_cast<double>(lowest), static_cast<double>(highest), nullptr, \
                   doc},                                                                                    \
        problem.name);
#define LOGITLESS_OPTION_INTEGER(name, NAME, type, default_value, lowest, highest, doc) \
  LOGITLESS_OPTION_REAL(name, NAME, default_value, lowest, highest, doc)
#define LOGITLESS_OPTION_FLAG(name, NAME, doc) LOGITLESS_OPTION_REAL(name, NAME, 0, 0, 1, doc)
#define LOGITLESS_OPTION_CHOICE(name, NAME, type, default_value, values, doc) \
  visit(OptionLine{group, title, #name, 0, 0, values, doc}, problem.name);
#include <logitless/options.def>
}

// Adds the options of the head that the list has, each under its own name, and --budget; they set the
// problem's members. with_targets: those of targets, too, on which no plan depends.
void add_problem_options(CLI::App& command, Problem& problem, bool with_targets);
// The options of the head as JSON, without those of targets and the budget.
nlohmann::ordered_json options_json(const Problem& problem);
// The name of a gradient method, as --gradient takes it.
std::string gradient_text(const Problem& problem);

// All that read text throw UsageError naming the option.
// A size, or "fastest", of which it makes LOGITLESS_FASTEST.
uint64_t parse_budget(const std::string& option, const std::string& text);
// A number within the line's range, or a power of two as 2^-9.
double parse_real(const std::string& option, const std::string& text, const OptionLine& line);
double parse_threshold(const std::string& option, const std::string& text);
// Whole numbers with an optional suffix, "4096" or "4k" or "128Ki".
int64_t parse_count(const std::string& option, const std::string& text);

// "f32", "bf16", "f16" or "f64", as --dtype takes them and results show them.
logitless_dtype parse_dtype(const std::string& option, const std::string& text);
const char* dtype_text(int32_t dtype);
int64_t dtype_bytes(int32_t dtype);

// Between files and the library.
logitless_dtype dtype_from_element(ElementType type);  // of real, I32 and I64 elements only
ElementType element_from_dtype(int32_t dtype);
std::vector<std::byte> encode(const std::vector<double>& values, int32_t dtype);  // of real elements
std::vector<double> decode(const std::vector<std::byte>& bytes, int32_t dtype);

// The parts of a list such as "1,2,3".
std::vector<std::string> split(const std::string& text, char separator);
// An option or tensor of the library as the command line spells it.
std::string flag_of(std::string name);

// Where a command computes.
struct DeviceChoice {
  int ordinal = LOGITLESS_HOST_MEMORY;
  std::string model;  // of a CUDA device that need not be here, for plans; empty: the one above
  bool is_host() const { return ordinal == LOGITLESS_HOST_MEMORY; }
};

// Reads "cpu" or "cuda:N", or, where a model of device is enough, "h200". Throws UsageError for anything
// else, and for a --backend that works elsewhere; std::runtime_error when there is no such device or it is
// not usable.
DeviceChoice parse_device(const GlobalOptions& globals, const std::string& text, bool or_model = false);

// The context that --backend NAME[:ENGINE] and --threads ask for, on host memory or a CUDA device's;
// `backend` overrides --backend when not empty.
Context make_context(const GlobalOptions& globals, const std::string& backend = {},
                     const DeviceChoice& device = {});

// Prints one JSON document on stdout. Text that is not UTF-8 is replaced, not refused; NaN becomes null.
void print_json(const nlohmann::ordered_json& document);
// Prints the document as JSON, or as text: a fact a line, with units. Lists of plain facts take one line;
// empty facts are left out.
void print_report(const nlohmann::ordered_json& document, bool as_json);

// Objects as a table with a column for each key.
std::string table_text(const nlohmann::ordered_json& rows, std::initializer_list<const char*> keys);

// A plan as JSON: plan, backend, workspace_bytes, cost_matmuls, predicted_seconds, token_chunk,
// cached_columns, vocab_window, threads, config, engine, reason, choice.
nlohmann::ordered_json plan_json(const PlanInfo& info);

}  // namespace logitless::cli
