#pragma once
#include <CLI/CLI.hpp>
#include <logitless/logitless.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "application.h"

namespace logitless::cli {

// Where a command computes.
struct DeviceChoice {
  int ordinal = LOGITLESS_HOST_MEMORY;
  std::string model;  // of a CUDA device that need not be here, for plans; empty: the one above
};

// Reads "cpu" or "cuda:N", or, where a model of device is enough, "h200". Throws UsageError for anything
// else, and for a --backend that works elsewhere; std::runtime_error when there is no such device or it is
// not usable.
DeviceChoice parse_device(const GlobalOptions& globals, const std::string& text, bool or_model = false);

// The context that --backend NAME[:ISA] and --threads ask for, on host memory or a CUDA device's; `backend`
// overrides --backend when not empty. Throws UsageError for a backend that this build does not have.
Context make_context(const GlobalOptions& globals, const std::string& backend = {},
                     const DeviceChoice& device = {});

// Prints one JSON document on stdout. Text that is not UTF-8 is replaced, not refused; NaN becomes null.
void print_json(const nlohmann::ordered_json& document);

// What a plan is, as JSON: plan, backend, workspace_bytes, cost_f, predicted_seconds, token_chunk,
// kept_columns, vocab_window, threads, config, implementation, reason.
nlohmann::ordered_json plan_json(const PlanInfo& info);

}  // namespace logitless::cli
