#include "commands/context.h"

#include <algorithm>
#include <cctype>
#include <iostream>
#include <stdexcept>

namespace logitless::cli {
namespace {

[[noreturn]] void refuse(const std::string& expected, const std::string& got, const std::string& why = {}) {
  throw UsageError("--device: expected " + expected + ", got '" + got + "'" + why);
}

int parse_ordinal(const std::string& text) {
  constexpr size_t kMostDigits = 4;
  const std::string digits = text.substr(text.find(':') + 1);
  const bool is_number = std::all_of(digits.begin(), digits.end(),
                                     [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; });
  if (!text.starts_with("cuda:") || digits.empty() || digits.size() > kMostDigits || !is_number) {
    refuse("cpu or cuda:N", text);
  }
  return std::stoi(digits);
}

}  // namespace

DeviceChoice parse_device(const GlobalOptions& globals, const std::string& text, bool or_model) {
  if (or_model && text != "cpu" && !text.starts_with("cuda")) {
    DeviceChoice choice;
    choice.model = text;
    try {
      make_context(globals, {}, choice);
    } catch (const Error& error) {
      refuse("cpu, cuda:N or a model", text, std::string(": ") + error.what());
    }
    return choice;
  }
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

Context make_context(const GlobalOptions& globals, const std::string& backend, const DeviceChoice& device) {
  const std::string wanted = backend.empty() ? globals.backend : backend;
  const size_t colon = wanted.find(':');
  const std::string name = wanted.substr(0, colon);
  const std::string isa = colon == std::string::npos ? "" : wanted.substr(colon + 1);
  std::string known;
  bool found = name.empty();
  for (int32_t i = 0; i < logitless_backend_count(); ++i) {
    known += (i == 0 ? "" : ", ") + std::string(logitless_backend_name(i));
    found = found || name == logitless_backend_name(i);
  }
  if (!found) throw UsageError("--backend: expected one of " + known + ", got '" + name + "'");
  ContextOptions options;
  options.backend = name.empty() ? nullptr : name.c_str();
  options.isa = isa.empty() ? nullptr : isa.c_str();
  options.threads = globals.threads;
  options.device = device.ordinal;
  options.device_model = device.model.empty() ? nullptr : device.model.c_str();
  return Context(options);
}

void print_json(const nlohmann::ordered_json& document) {
  std::cout << document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << "\n";
}

nlohmann::ordered_json plan_json(const PlanInfo& info) {
  return {{"plan", logitless_plan_kind_name(static_cast<logitless_plan_kind>(info.kind))},
          {"backend", info.backend},
          {"workspace_bytes", info.workspace_bytes},
          {"cost_f", info.cost_f},
          {"predicted_seconds", info.predicted_seconds},
          {"token_chunk", info.token_chunk},
          {"kept_columns", info.kept_columns},
          {"vocab_window", info.vocab_window},
          {"threads", info.threads},
          {"config", info.config},
          {"implementation", info.implementation},
          {"reason", info.reason},
          {"choice", info.choice}};
}

}  // namespace logitless::cli
