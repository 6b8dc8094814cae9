#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace logitless::cli {

// Parses JSON from a file strictly: nothing may follow the value, nesting ends at max_depth, and an object
// may not have a key twice. Throws FileError(file, ...).
nlohmann::json parse_strict_json(std::string_view text, const std::string& file, int max_depth);

}  // namespace logitless::cli
