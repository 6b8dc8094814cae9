#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace logitless::train {

struct DefaultText {
  std::string description;
  std::vector<std::filesystem::path> files;
};

// Text that development machines have: the sources of Python's standard library, else the headers in
// /usr/include. Empty `files` when there is neither.
DefaultText find_default_text();

}  // namespace logitless::train
