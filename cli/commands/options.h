#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <logitless/logitless.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "application.h"
#include "io/tensor.h"

namespace logitless::cli {

// The numbers that define a loss, and how gradients are made, as the commands share them.
struct LossOptions {
  double scale = 1;
  double softcap = 0;
  double temperature = 1;
  double label_smoothing = 0;
  double z_loss = 0;
  std::string budget;         // text of --budget; empty: by default
  std::string compute_dtype;  // text of --compute-dtype; empty: operands as they are
  bool allow_tf32 = false;
  bool batch_invariant = false;
  std::string gradient = "exact";
  std::string threshold;  // empty: LOGITLESS_DEFAULT_THRESHOLD
  int64_t seed = 0;
};
// has_seed: whether the command takes --gradient-seed, too.
void add_loss_options(CLI::App& command, LossOptions& options, bool has_seed);
// Throws UsageError for a budget that is not a size, and a threshold that is not a number in (0, 1].
void apply(const LossOptions& options, Problem& problem);

CLI::Validator non_negative();  // a finite number, 0 or above

// A size, or "fastest", of which it makes LOGITLESS_FASTEST. Throws UsageError naming the option.
uint64_t parse_budget(const std::string& option, const std::string& text);
// A number, or a power of two as 2^-9.
double parse_threshold(const std::string& option, const std::string& text);
// Whole numbers with an optional suffix, "4096" or "4k" or "128Ki". Throws UsageError naming the option.
int64_t parse_count(const std::string& option, const std::string& text);
// The name of a logitless_gradient, as --gradient takes it.
const char* gradient_text(int32_t gradient);

// "f32", "bf16", "f16" or "f64", as --dtype takes them and results show them.
logitless_dtype parse_dtype(const std::string& option, const std::string& text);
const char* dtype_text(int32_t dtype);
int64_t dtype_bytes(int32_t dtype);

// Between files and the library.
logitless_dtype dtype_from_element(ElementType type);  // of real, I32 and I64 elements only
ElementType element_from_dtype(int32_t dtype);

// The parts of a list such as "1,2,3".
std::vector<std::string> split(const std::string& text, char separator);

}  // namespace logitless::cli
