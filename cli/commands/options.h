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
  std::string_view group;  // name of its group, and the title for people
  const char* title;
  const char* name;
  double lowest, highest;  // range of numbers
  const char* values;      // names of a choice, separated by |; null: no choice
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

// Adds the head's options of options.def, each under its own name, and --budget. They set the problem's
// members. with_targets: include options of targets, on which no plan depends.
void add_problem_options(CLI::App& command, Problem& problem, bool with_targets);
// Returns the head's options as JSON, without those of targets and the budget.
nlohmann::ordered_json options_json(const Problem& problem);
// Returns the name of the gradient method, as --gradient takes it.
std::string gradient_text(const Problem& problem);

// All functions that read text throw UsageError, which names the option.
// Reads a size, or "fastest", which gives LOGITLESS_FASTEST.
uint64_t parse_budget(const std::string& option, const std::string& text);
// Reads a number within the line's range, or a power of two such as 2^-9.
double parse_real(const std::string& option, const std::string& text, const OptionLine& line);
double parse_threshold(const std::string& option, const std::string& text);
// Reads a whole number with an optional suffix: "4096", "4k" or "128Ki".
int64_t parse_count(const std::string& option, const std::string& text);

// Reads and writes "f32", "bf16", "f16" or "f64", as in --dtype and results.
logitless_dtype parse_dtype(const std::string& option, const std::string& text);
const char* dtype_text(int32_t dtype);
int64_t dtype_bytes(int32_t dtype);

// Conversions between files and the library.
logitless_dtype dtype_from_element(ElementType type);  // for real, I32 and I64 elements only
ElementType element_from_dtype(int32_t dtype);
std::vector<std::byte> encode(const std::vector<double>& values, int32_t dtype);  // for real elements
std::vector<double> decode(const std::vector<std::byte>& bytes, int32_t dtype);

// Returns the parts of a list such as "1,2,3".
std::vector<std::string> split(const std::string& text, char separator);
// Returns the command line's spelling of an option or tensor of the library.
std::string flag_of(std::string name);

// The place where a command computes.
struct DeviceChoice {
  int ordinal = LOGITLESS_HOST_MEMORY;
  std::string model;  // model of a CUDA device to plan for, which may be elsewhere; empty: the ordinal above
  bool is_host() const { return ordinal == LOGITLESS_HOST_MEMORY; }
};

// Reads "cpu" or "cuda:N", and with or_model also a model of device such as "h200". Throws UsageError for
// anything else, and for a --backend that works elsewhere. Throws std::runtime_error if there is no such
// device or it is not usable.
DeviceChoice parse_device(const GlobalOptions& globals, const std::string& text, bool or_model = false);

// Makes the context of --backend NAME[:ENGINE] and --threads, on host memory or a CUDA device. `backend`, if
// not empty, overrides --backend.
Context make_context(const GlobalOptions& globals, const std::string& backend = {},
                     const DeviceChoice& device = {});

// Prints one JSON document on stdout. Text that is not UTF-8 is replaced; NaN becomes null.
void print_json(const nlohmann::ordered_json& document);
// Prints the document as JSON, or as text: one fact a line, with units. Lists of plain facts take one line;
// empty facts are left out.
void print_report(const nlohmann::ordered_json& document, bool as_json);

// Returns objects as a table with a column for each key.
std::string table_text(const nlohmann::ordered_json& rows, std::initializer_list<const char*> keys);

// Returns a plan as JSON: plan, backend, workspace_bytes, cost_matmuls, predicted_seconds, token_chunk,
// cached_columns, vocab_window, threads, config, engine, reason, choice.
nlohmann::ordered_json plan_json(const PlanInfo& info);

}  // namespace logitless::cli
