#pragma once
#include <stdexcept>
#include <string>
#include <string_view>

namespace logitless::cli {

// A file cannot be read, written or understood. The message begins with the file's name.
class FileError : public std::runtime_error {
 public:
  FileError(const std::string& file, const std::string& message)
      : std::runtime_error(file + ": " + message) {}
};

// Text out of a file in quotes, fit for a message: short, and without control characters.
std::string in_quotes(std::string_view text);

}  // namespace logitless::cli
