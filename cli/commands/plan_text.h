#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace logitless::cli {

// The words in the plans' names and configurations that need one, and what they mean.
nlohmann::ordered_json words_of(const nlohmann::ordered_json& plans);

// Prints the content of `logitless plan --json` as text on stdout: the chosen plan, a table of all, what the
// words in it mean, and the sizes beside them. model: a name for the first line, or empty. taken: of the
// model and of defaults, or empty. verbose: each plan's configuration, too.
void print_plans(const nlohmann::ordered_json& result, const std::string& model, const std::string& taken,
                 bool verbose);

}  // namespace logitless::cli
