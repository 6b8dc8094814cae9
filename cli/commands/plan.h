#pragma once
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "commands/options.h"

namespace logitless::cli {

struct PlanOptions {
  std::string tokens = "8192";
  std::string vocab;
  std::string hidden;
  std::string model;
  std::string dtype;  // empty: the config's, else bf16
  std::string weight_dtype;
  std::string device = "cpu";
  bool list_models = false;
  bool verbose = false;
  bool no_grad = false;
  bool freeze_hidden = false;
  bool freeze_weight = false;
  bool accumulate = false;
  Problem problem;  // options of the head, and whether it has a bias and entropies
};

// The head that the options name: a published model's, a config.json's, or neither.
struct PlanModel {
  std::string name;              // for people; empty: neither
  std::string taken;             // options that the model set, for people; may be empty
  nlohmann::ordered_json facts;  // null: neither
};

// Fills in the options that were not given from the model, and always --dtype. Throws UsageError for an
// unknown model, and FileError.
PlanModel read_plan_model(PlanOptions& options, const CLI::App& command);

// Prints the table of published models.
void list_models(bool json);

// Adds notes to a list of plans, the fastest first. Each plan is an object of plan_json() with "fits" and
// "chosen". "slow" is whether it takes more than ten times as long as the first. "why_not" is the reason why
// the chosen plan was preferred to one that fits and is predicted to be faster; else empty. "config" of plans
// that differ only in workspace gets words that distinguish them.
void add_notes(nlohmann::ordered_json& plans, const Problem& problem);

// Returns sentences below the list, for people.
nlohmann::ordered_json notes_of(const nlohmann::ordered_json& plans, const Problem& problem);

// Returns the source of the predicted times: {"measured": whether the kernels were timed on such a device,
// "basis": text}.
nlohmann::ordered_json times_json(const nlohmann::ordered_json& plan, const DeviceChoice& device);

// Returns the words in the plans' names and configurations that need an explanation, with their meanings.
nlohmann::ordered_json words_of(const nlohmann::ordered_json& plans);

// Prints the content of `logitless plan --json` as text on stdout: the chosen plan, a table of all plans, the
// meanings of its words, and sizes. model: a name for the first line, or empty. taken: options that the model
// and defaults set, or empty. verbose: also each plan's configuration.
void print_plans(const nlohmann::ordered_json& result, const std::string& model, const std::string& taken,
                 bool verbose);

}  // namespace logitless::cli
