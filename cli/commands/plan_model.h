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
  std::string classifier_dtype;
  std::string device = "cpu";
  bool list_models = false;
  bool verbose = false;
  bool no_grad = false;
  bool freeze_hidden = false;
  bool freeze_classifier = false;
  bool bias = false;
  bool entropy = false;
  bool accumulate = false;
  LossOptions loss;
};

// What the options say of the head: a published model, or that of a config.json, or neither.
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

}  // namespace logitless::cli
