#include "commands/options.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <stdexcept>

#include "support/format.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

struct DTypeRow {
  ElementType element;
  const char* text;
  const char* long_text;
};
// Indexed by logitless_dtype.
constexpr std::array<DTypeRow, 6> kDTypes{{{ElementType::kF32, "f32", "float32"},
                                           {ElementType::kBF16, "bf16", "bfloat16"},
                                           {ElementType::kF16, "f16", "float16"},
                                           {ElementType::kF64, "f64", "float64"},
                                           {ElementType::kI32, "i32", "int32"},
                                           {ElementType::kI64, "i64", "int64"}}};
static_assert(LOGITLESS_F32 == 0 && LOGITLESS_BF16 == 1 && LOGITLESS_F16 == 2 && LOGITLESS_F64 == 3 &&
              LOGITLESS_I32 == 4 && LOGITLESS_I64 == 5);

// Whether a command has the option under its own name. Sizes come from its tensors, and --budget stands for
// max_workspace_bytes.
bool is_offered(const OptionLine& line, bool with_targets) {
  return line.group != "SIZES" && line.group != "RANKS" && (with_targets || line.group != "TARGETS") &&
         line.name != std::string_view("max_workspace_bytes");
}

// Returns the number in a text of these characters, else NaN. Not every standard library has std::from_chars
// for floating-point numbers.
double decimal(const std::string& text, const char* characters) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  return text.find_first_not_of(characters) == std::string::npos && end != text.c_str() && *end == '\0'
             ? value
             : NAN;
}

// Reads a number with a suffix: k, M, G, T are powers of 1000, Ki, Mi, Gi, Ti of 1024. Returns NaN if it
// cannot.
double parse_scaled(std::string text, bool bytes) {
  constexpr const char* kDigits = "-.0123456789";
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const size_t length = std::min(text.find_first_not_of(kDigits), text.size());
  const double value = decimal(text.substr(0, length), kDigits);
  std::string_view rest = std::string_view(text).substr(length);
  while (rest.starts_with(' ')) rest.remove_prefix(1);
  if (bytes && rest.ends_with('b')) rest.remove_suffix(1);
  if (rest.empty()) return value;
  const size_t power = std::string_view("kmgt").find(rest.front());
  const bool is_binary = rest.substr(1) == "i";
  if (power == std::string_view::npos || (!is_binary && rest.size() > 1)) return NAN;
  return value * std::pow(is_binary ? 1024 : 1000, static_cast<double>(power + 1));
}

[[noreturn]] void refuse(const std::string& option, const std::string& expected, const std::string& got,
                         const std::string& why = {}) {
  throw UsageError(option + ": expected " + expected + ", got '" + got + "'" + why);
}

// Describes the range as the library's messages do.
std::string range_text(const OptionLine& line, const std::string& number) {
  if (line.highest < 0x1p63) {
    return number + " in [" + format_number(line.lowest, 17) + ", " + format_number(line.highest, 17) + "]";
  }
  return number + (line.lowest <= -0x1p63 ? ""
                   : line.lowest > 0      ? " > 0"
                                          : " >= " + format_number(line.lowest));
}

template <class T>
T parse_integer(const std::string& option, const std::string& text, const OptionLine& line) {
  T value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const auto number = static_cast<double>(value);
  if (error == std::errc() && end == text.data() + text.size() && number >= line.lowest &&
      number <= line.highest)
    return value;
  refuse(option, range_text(line, "a whole number"), text);
}

// Returns the names of a choice. Some numbers have none.
std::string names_of(const OptionLine& line) {
  std::string names;
  for (const std::string& name : split(line.values, '|')) {
    if (!name.empty()) names += (names.empty() ? "" : "|") + name;
  }
  return names;
}

// Returns the number of a choice's value. Dtypes also have a short name.
int32_t parse_choice(const std::string& option, const std::string& text, const OptionLine& line) {
  std::string name = text;
  for (const DTypeRow& row : kDTypes) {
    if (text == row.text) name = row.long_text;
  }
  const std::vector<std::string> names = split(line.values, '|');
  const auto place = std::find(names.begin(), names.end(), name) - names.begin();
  if (place == static_cast<ptrdiff_t>(names.size())) refuse(option, "one of " + names_of(line), text);
  return static_cast<int32_t>(place);
}

template <class T>
T parse_value(const std::string& option, const std::string& text, const OptionLine& line) {
  if constexpr (std::is_same_v<T, double>) {
    return parse_real(option, text, line);
  } else {
    if (line.values != nullptr) return static_cast<T>(parse_choice(option, text, line));
    return parse_integer<T>(option, text, line);
  }
}

// Returns a value for texts and JSON; a choice by its name.
template <class T>
ordered_json value_json(const OptionLine& line, T value) {
  if constexpr (std::is_same_v<T, int32_t>) {
    if (line.values != nullptr) return split(line.values, '|').at(static_cast<size_t>(value));
  }
  return value;
}

std::string spaced(std::string name) {
  std::replace(name.begin(), name.end(), '_', ' ');
  return name;
}

bool is_plain(const ordered_json& fact) {
  return !fact.is_structured() || (fact.is_array() && (fact.empty() || !fact.front().is_structured()));
}

std::string fact_text(std::string_view name, const ordered_json& fact, int digits = 9) {
  if (fact.is_array()) {
    std::string text;
    for (const auto& part : fact) text += (text.empty() ? "" : " ") + fact_text(name, part);
    return text;
  }
  if (fact.is_string()) return fact;
  if (fact.is_boolean()) return fact ? "yes" : "no";
  if (fact.is_number_float() && std::isnan(fact.get<double>())) return "nan";
  if (!fact.is_number()) return "-";
  if (name.ends_with("workspace_bytes")) return format_budget(fact);
  if (name.ends_with("bytes")) return format_bytes(fact);
  if (name.ends_with("seconds")) return format_seconds(fact);
  return fact.is_number_integer() ? format_count(fact) : format_number(fact, digits);
}

void print_facts(const ordered_json& facts, const std::string& indent) {
  for (const auto& [key, fact] : facts.items()) {
    std::string line;
    if (is_plain(fact)) line = fact_text(key, fact);
    if (fact.is_object() && std::all_of(fact.begin(), fact.end(), is_plain)) {
      for (const auto& [name, value] : fact.items()) {
        if (value.is_string() && value.get_ref<const std::string&>().empty()) continue;
        line += (line.empty() ? "" : ", ") + spaced(name) + " " + fact_text(name, value);
      }
    }
    const bool is_nested = !is_plain(fact) && line.empty();
    if (line.empty() && !is_nested) continue;
    std::cout << indent << (facts.is_array() ? "-" : spaced(key) + ":") << (is_nested ? "" : " ") << line
              << "\n";
    if (is_nested) print_facts(fact, indent + "  ");
  }
}

int parse_ordinal(const std::string& text) {
  constexpr std::string_view kBefore = "cuda:";
  const char* const end = text.data() + text.size();
  int ordinal = -1;
  if (!text.starts_with(kBefore) || std::from_chars(text.data() + kBefore.size(), end, ordinal).ptr != end ||
      ordinal < 0) {
    refuse("--device", "cpu or cuda:N", text);
  }
  return ordinal;
}

}  // namespace

void add_problem_options(CLI::App& command, Problem& problem, bool with_targets) {
  for_each_option(problem, [&](const OptionLine& line, auto& value) {
    if (!is_offered(line, with_targets)) return;
    const std::string flag = flag_of(line.name);
    using T = std::remove_reference_t<decltype(value)>;
    if constexpr (std::is_same_v<T, bool>) {
      command.add_flag(flag, value, line.doc)->group(line.title);
    } else {
      const ordered_json now = value_json(line, value);
      command
          .add_option_function<std::string>(
              flag,
              [&value, flag, line](const std::string& text) { value = parse_value<T>(flag, text, line); },
              line.doc)
          ->group(line.title)
          ->type_name(line.values != nullptr ? names_of(line) : "NUMBER")
          ->default_str(now.is_string() ? now.get<std::string>() : now.dump());
    }
  });
  const auto set_budget = [&problem](const std::string& text) {
    problem.max_workspace_bytes = parse_budget("--budget", text);
    if (problem.max_workspace_bytes == 0) refuse("--budget", "more than 0 bytes", text);
  };
  command
      .add_option_function<std::string>(
          "--budget", set_budget,
          "Limit of the workspace, such as 256MiB or 1GB; never exceeded. fastest: no limit. Default: the "
          "smallest plan within 3% of the fastest, or one of at most a quarter of the float32 logits + "
          "64 MiB if that costs at most 6%")
      ->type_name("SIZE");
}

ordered_json options_json(const Problem& problem) {
  ordered_json out;
  for_each_option(problem, [&](const OptionLine& line, const auto& value) {
    if (is_offered(line, false)) out[line.name] = value_json(line, value);
  });
  return out;
}

std::string gradient_text(const Problem& problem) {
  return options_json(problem)["gradient"];
}

uint64_t parse_budget(const std::string& option, const std::string& text) {
  if (text == "fastest") return LOGITLESS_FASTEST;
  const double bytes = parse_scaled(text, true);
  if (!(bytes >= 0 && bytes < 0x1p62)) refuse(option, "a size such as 256MiB or 1GB", text);
  return static_cast<uint64_t>(bytes);
}

double parse_real(const std::string& option, const std::string& text, const OptionLine& line) {
  const bool is_power = text.starts_with("2^");
  const double number = decimal(text.substr(is_power ? 2 : 0), "+-.0123456789eE");
  const double value = is_power ? std::exp2(number) : number;
  if (std::isfinite(value) && value >= line.lowest && value <= line.highest) return value;
  refuse(option, range_text(line, std::isinf(line.highest) ? "a finite number" : "a number"), text);
}

double parse_threshold(const std::string& option, const std::string& text) {
  double threshold = 0;
  for_each_option(Problem{}, [&](const OptionLine& line, auto&) {
    if (std::string_view(line.name) == "threshold") threshold = parse_real(option, text, line);
  });
  return threshold;
}

int64_t parse_count(const std::string& option, const std::string& text) {
  const double count = parse_scaled(text, false);
  if (!(count >= 0 && count <= 0x1p53 && count == std::floor(count))) {
    refuse(option, "a whole number such as 4096 or 128Ki", text);
  }
  return static_cast<int64_t>(count);
}

logitless_dtype parse_dtype(const std::string& option, const std::string& text) {
  for (int dtype = LOGITLESS_F32; dtype <= LOGITLESS_F64; ++dtype) {
    const DTypeRow& row = kDTypes[static_cast<size_t>(dtype)];
    if (text == row.text || text == row.long_text) return static_cast<logitless_dtype>(dtype);
  }
  refuse(option, "f32, bf16, f16 or f64", text);
}

const char* dtype_text(int32_t dtype) {
  return kDTypes.at(static_cast<size_t>(dtype)).text;
}

int64_t dtype_bytes(int32_t dtype) {
  return bits_of(element_from_dtype(dtype)) / 8;
}

logitless_dtype dtype_from_element(ElementType type) {
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    if (kDTypes[i].element == type) return static_cast<logitless_dtype>(i);
  }
  throw std::logic_error("no dtype for elements of type " + std::string(name_of(type)));
}

ElementType element_from_dtype(int32_t dtype) {
  return kDTypes.at(static_cast<size_t>(dtype)).element;
}

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
  const ElementType type = element_from_dtype(dtype);
  std::vector<double> out(bytes.size() / static_cast<size_t>(dtype_bytes(dtype)));
  for (size_t i = 0; i < out.size(); ++i) out[i] = real_element(bytes.data(), type, static_cast<int64_t>(i));
  return out;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::string flag_of(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

DeviceChoice parse_device(const GlobalOptions& globals, const std::string& text, bool or_model) {
  if (or_model && text != "cpu" && !text.starts_with("cuda")) {
    DeviceChoice choice;
    choice.model = text;
    try {
      make_context(globals, {}, choice);
    } catch (const Error& error) {
      refuse("--device", "cpu, cuda:N or a model", text, std::string(": ") + error.what());
    }
    return choice;
  }
  const std::string backend = globals.backend.substr(0, globals.backend.find(':'));
  if (text == "cpu") {
    if (backend == "cuda") refuse("--device", "cuda:N with --backend cuda", text);
    return {};
  }
  const int ordinal = parse_ordinal(text);
  if (!backend.empty() && backend != "cuda") refuse("--device", "cpu with --backend " + backend, text);
  std::string why_not;
  const std::vector<DeviceInfo> known = devices(&why_not);
  if (why_not.empty() && static_cast<size_t>(ordinal) >= known.size()) {
    why_not = "there is no CUDA device " + std::to_string(ordinal) +
              "; devices here: " + std::to_string(known.size());
  } else if (why_not.empty()) {
    why_not = known[static_cast<size_t>(ordinal)].why_unavailable;
  }
  if (!why_not.empty()) {
    throw std::runtime_error("--device: expected a usable CUDA device, got " + text + ": " + why_not);
  }
  return {.ordinal = ordinal, .model = {}};
}

Context make_context(const GlobalOptions& globals, const std::string& backend, const DeviceChoice& device) {
  const std::string wanted = backend.empty() ? globals.backend : backend;
  const size_t colon = wanted.find(':');
  const std::string name = wanted.substr(0, colon);
  const std::string engine = colon == std::string::npos ? "" : wanted.substr(colon + 1);
  ContextOptions options;
  options.backend = name.empty() ? nullptr : name.c_str();
  options.engine = engine.empty() ? nullptr : engine.c_str();
  options.threads = globals.threads;
  options.device = device.ordinal;
  options.device_model = device.model.empty() ? nullptr : device.model.c_str();
  return Context(options);
}

void print_json(const ordered_json& document) {
  std::cout << document.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
}

void print_report(const ordered_json& document, bool as_json) {
  if (as_json) return print_json(document);
  print_facts(document, "");
}

std::string table_text(const ordered_json& rows, std::initializer_list<const char*> keys) {
  std::vector<std::string> cells;
  for (const char* key : keys) cells.push_back(spaced(key));
  Table table(cells);
  for (const auto& row : rows) {
    cells.clear();
    for (const char* key : keys) cells.push_back(fact_text(key, row[key], 5));
    table.add(cells);
  }
  return table.text();
}

ordered_json plan_json(const PlanInfo& info) {
  return {{"plan", logitless_plan_kind_name(static_cast<logitless_plan_kind>(info.kind))},
          {"backend", info.backend},
          {"workspace_bytes", info.workspace_bytes},
          {"cost_matmuls", info.cost_matmuls},
          {"predicted_seconds", info.predicted_seconds},
          {"token_chunk", info.token_chunk},
          {"cached_columns", info.cached_columns},
          {"vocab_window", info.vocab_window},
          {"threads", info.threads},
          {"config", info.config},
          {"engine", info.engine},
          {"reason", info.reason},
          {"choice", info.choice}};
}

}  // namespace logitless::cli
