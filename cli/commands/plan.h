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

// The head that the options name: a published model's, or that of a config.json, or neither.
struct PlanModel {
  std::string name;              // for people; empty: neither
  std::string taken;             // what was taken in the place of options not given, for people; may be empty
  nlohmann::ordered_json facts;  // null: neither
};

// Writes what the model says in the place of the options that were not given, --dtype always. Throws
// UsageError for a model that is not known, and FileError.
PlanModel read_plan_model(PlanOptions& options, const CLI::App& command);

// Prints the table of published models.
void list_models(bool json);

// Notes on a list of plans, the fastest first, each an object of
// plan_json() with "fits" and "chosen" too.

// Adds "slow", whether a plan takes more than ten times as long as the first, and "why_not": of one that fits
// and is predicted to be faster than the chosen one, why that was preferred; else empty. "config" of plans
// that are alike but for workspace gets words that tell them apart.
void add_notes(nlohmann::ordered_json& plans, const Problem& problem);

// Sentences below the list, for people.
nlohmann::ordered_json notes_of(const nlohmann::ordered_json& plans, const Problem& problem);

// Where the predicted times come from: {"measured": whether the kernels were timed on such a device, "basis":
// text}.
nlohmann::ordered_json times_json(const nlohmann::ordered_json& plan, const DeviceChoice& device);

// The words in the plans' names and configurations that need one, and what they mean.
nlohmann::ordered_json words_of(const nlohmann::ordered_json& plans);

// Prints the content of `logitless plan --json` as text on stdout: the chosen plan, a table of all, what the
// words in it mean, and the sizes beside them. model: a name for the first line, or empty. taken: of the
// model and of defaults, or empty. verbose: each plan's configuration, too.
void print_plans(const nlohmann::ordered_json& result, const std::string& model, const std::string& taken,
                 bool verbose);

}  // namespace logitless::cli
