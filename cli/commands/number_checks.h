#pragma once
#include <CLI/CLI.hpp>

// Checks of options that are numbers, whose errors say what was expected and what came.
namespace logitless::cli {

CLI::Validator positive();      // finite, above 0
CLI::Validator non_negative();  // finite, 0 or above

}  // namespace logitless::cli
