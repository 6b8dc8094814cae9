#pragma once
#include <stdexcept>
#include <string>

namespace logitless::cli {

// Options before the subcommand; they hold for all of them.
struct GlobalOptions {
  bool json = false;    // one JSON document on stdout instead of text
  bool quiet = false;   // no progress on stderr
  int threads = 0;      // 0: all processors that this process may use
  std::string backend;  // empty: the best usable one
  std::string program;  // as it was called, for commands to try next
};

// What the user typed cannot be right: exit code 2. Every other exception is a failure: exit code 1.
class UsageError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace logitless::cli
