#include "commands/device_option.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>
#include <vector>

namespace logitless::cli {
namespace {

constexpr size_t kMostDigits = 4;

[[noreturn]] void refuse(const std::string& expected, const std::string& got, const std::string& why = {}) {
  throw UsageError("--device: expected " + expected + ", got '" + got + "'" + why);
}

int parse_ordinal(const std::string& text) {
  const std::string digits = text.substr(text.find(':') + 1);
  const bool is_number = std::all_of(digits.begin(), digits.end(),
                                     [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; });
  if (!text.starts_with("cuda:") || digits.empty() || digits.size() > kMostDigits || !is_number) {
    refuse("cpu or cuda:N", text);
  }
  return std::stoi(digits);
}

}  // namespace

void add_device_option(CLI::App& command, std::string& text, const std::string& help) {
  command.add_option("--device", text, help)->capture_default_str();
}

DeviceChoice parse_device_or_model(const GlobalOptions& globals, const std::string& text) {
  if (text == "cpu" || text.starts_with("cuda")) return parse_device(globals, text);
  DeviceChoice choice;
  choice.model = text;
  try {
    make_context(globals, {}, choice);
  } catch (const Error& error) {
    refuse("cpu, cuda:N or a model", text, std::string(": ") + error.what());
  }
  return choice;
}

DeviceChoice parse_device(const GlobalOptions& globals, const std::string& text) {
  const std::string backend = globals.backend.substr(0, globals.backend.find(':'));
  if (text == "cpu") {
    if (backend == "cuda") refuse("cuda:N with --backend cuda", text);
    return {};
  }
  const int ordinal = parse_ordinal(text);
  if (!backend.empty() && backend != "cuda") refuse("cpu with --backend " + backend, text);
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

}  // namespace logitless::cli
