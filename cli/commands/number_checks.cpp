#include "commands/number_checks.h"

#include <cmath>
#include <string>

namespace logitless::cli {
namespace {

template <class Accepts>
CLI::Validator number_that(const Accepts& accepts, const std::string& expected, const char* name) {
  const auto check = [accepts, expected](const std::string& text) -> std::string {
    double number = NAN;
    const bool known = CLI::detail::lexical_cast(text, number);
    return known && std::isfinite(number) && accepts(number) ? "" : "expected " + expected + ", got " + text;
  };
  return CLI::Validator(check, name);
}

}  // namespace

CLI::Validator positive() {
  return number_that([](double x) { return x > 0; }, "a finite number > 0", "POSITIVE");
}

CLI::Validator non_negative() {
  return number_that([](double x) { return x >= 0; }, "a finite number >= 0", "NONNEGATIVE");
}

}  // namespace logitless::cli
