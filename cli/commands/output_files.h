#pragma once
#include <string>
#include <vector>

namespace logitless::cli {

// An output file and the option that names it; not asked for where the path is empty.
struct OutputFile {
  std::string option;
  std::string path;
};

// Throws UsageError where an output would replace one of the inputs or another output.
void check_outputs(const std::vector<OutputFile>& outputs, const std::vector<std::string>& inputs);

}  // namespace logitless::cli
