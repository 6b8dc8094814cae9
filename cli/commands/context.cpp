#include "commands/context.h"

#include <iostream>

namespace logitless::cli {

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
