#include "commands/output_files.h"

#include <filesystem>

#include "options.h"

namespace logitless::cli {
namespace {

namespace fs = std::filesystem;

// By the file itself where both exist, else by name.
bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  if (fs::equivalent(a, b, error)) return true;
  const fs::path canonical = fs::weakly_canonical(fs::absolute(a), error);
  return !error && canonical == fs::weakly_canonical(fs::absolute(b), error) && !error;
}

}  // namespace

void check_outputs(const std::vector<OutputFile>& outputs, const std::vector<std::string>& inputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& [option, path] = outputs[i];
    if (path.empty()) continue;
    for (const std::string& input : inputs) {
      if (same_file(path, input)) throw UsageError(option + ": " + path + " is an input of this run");
    }
    for (size_t other = 0; other < i; ++other) {
      if (outputs[other].path.empty() || !same_file(path, outputs[other].path)) continue;
      throw UsageError(option + ": expected a file other than that of " + outputs[other].option + ", got '" +
                       path + "'");
    }
  }
}

}  // namespace logitless::cli
