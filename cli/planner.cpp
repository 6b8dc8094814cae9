// `logitless plan` as a function, for the planner page: the command line's own code, compiled to WebAssembly.
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "application.h"
#include "commands/options.h"

namespace {

// Captures all that is written to a stream during its life.
class Captured {
 public:
  explicit Captured(std::ostream& stream) : stream_(stream), before_(stream.rdbuf(text_.rdbuf())) {}
  ~Captured() { stream_.rdbuf(before_); }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;

  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  std::ostream& stream_;
  std::streambuf* before_;
};

}  // namespace

// Runs the arguments of `logitless`, one a line. Returns {"code": exit code, "out": text, "err": text} as
// JSON, which is valid until the next call.
extern "C" const char* logitless_planner(const char* lines) {
  std::vector<std::string> arguments = logitless::cli::split(lines, '\n');
  arguments.insert(arguments.begin(), "logitless");
  std::vector<const char*> argv(arguments.size());
  std::transform(arguments.begin(), arguments.end(), argv.begin(), [](const auto& a) { return a.c_str(); });
  static constexpr logitless::cli::AddCommand kCommands[] = {logitless::cli::add_plan_command};
  static std::string result;
  const Captured out(std::cout), err(std::cerr);
  const int code = logitless::cli::run_application(static_cast<int>(argv.size()), argv.data(), kCommands);
  result = nlohmann::json{{"code", code}, {"out", out.text()}, {"err", err.text()}}.dump();
  return result.c_str();
}
