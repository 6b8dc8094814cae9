#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "train/results.h"
#include "train/settings.h"

namespace logitless::train {

// The closing comparison, for people.
std::string summary(const Results& results);

// All figures.
nlohmann::ordered_json to_json(const Results& results, const Settings& settings);

// Writes loss.svg, memory.svg and, after a comparison, agreement.svg into the folder; returns their paths.
std::vector<std::filesystem::path> write_plots(const Results& results, const std::filesystem::path& folder);

}  // namespace logitless::train
