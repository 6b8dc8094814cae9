#include "commands/thinning_options.h"

#include <array>
#include <cmath>
#include <string_view>

#include "commands/units.h"
#include "options.h"

namespace logitless::cli {
namespace {

struct GradientName {
  const char* name;
  Gradient gradient;
};
constexpr std::array<GradientName, 3> kGradients{{{"exact", Gradient::exact},
                                                  {"thinned", Gradient::thinned},
                                                  {"always-thinned", Gradient::always_thinned}}};

// NaN for what is not a number as a whole.
double number_of(std::string_view text) {
  const auto [value, length] = leading_number(text, true);
  return length == text.size() ? value : NAN;
}

std::string default_threshold() {
  return "2^" + std::to_string(std::ilogb(LOGITLESS_DEFAULT_THRESHOLD));
}

}  // namespace

void add_thinning_options(CLI::App& command, ThinningOptions& options, bool has_seed) {
  const std::string group = "Gradients";
  command
      .add_option("--gradient", options.gradient,
                  "exact, or thinned: unbiased, from a few elements of each softmax, and exact where that "
                  "could be slower; or always-thinned")
      ->check(CLI::IsMember({kGradients[0].name, kGradients[1].name, kGradients[2].name}))
      ->group(group)
      ->capture_default_str();
  command
      .add_option("--threshold", options.threshold,
                  "Thinned: probabilities of at least this are kept, smaller ones drawn; 0.001 or 2^-10")
      ->group(group)
      ->default_str(default_threshold());
  if (!has_seed) return;
  command
      .add_option("--gradient-seed", options.seed, "Thinned: seed of the draw; the same one, the same bits")
      ->group(group)
      ->capture_default_str();
}

void apply(const ThinningOptions& options, Problem& problem) {
  const double threshold = options.threshold.empty() ? LOGITLESS_DEFAULT_THRESHOLD
                                                     : parse_threshold("--threshold", options.threshold);
  for (const GradientName& known : kGradients) {
    if (options.gradient == known.name && known.gradient != Gradient::exact) {
      set_gradient(problem, known.gradient, threshold, options.seed);
    }
  }
}

const char* gradient_text(int32_t gradient) {
  return kGradients.at(static_cast<size_t>(gradient)).name;
}

double parse_threshold(const std::string& option, const std::string& text) {
  const bool is_power = text.starts_with("2^");
  const double number = number_of(std::string_view(text).substr(is_power ? 2 : 0));
  const double value = is_power ? std::exp2(number) : number;
  if (!(value > 0 && value <= 1)) {
    throw UsageError(option + ": expected a number in (0, 1], such as 0.001 or 2^-10, got '" + text + "'");
  }
  return value;
}

}  // namespace logitless::cli
