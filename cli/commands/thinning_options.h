#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <logitless/logitless.hpp>
#include <string>

namespace logitless::cli {

// How gradients are made, as the commands share it.
struct ThinningOptions {
  std::string gradient = "exact";
  std::string threshold;  // empty: LOGITLESS_DEFAULT_THRESHOLD
  int64_t seed = 0;
};
// has_seed: whether the command takes --gradient-seed, too.
void add_thinning_options(CLI::App& command, ThinningOptions& options, bool has_seed);
// Throws UsageError for a threshold that is not a number in (0, 1].
void apply(const ThinningOptions& options, Problem& problem);
// The name of a logitless_gradient, as --gradient takes it.
const char* gradient_text(int32_t gradient);
// A number, or a power of two as 2^-9.
double parse_threshold(const std::string& option, const std::string& text);

}  // namespace logitless::cli
