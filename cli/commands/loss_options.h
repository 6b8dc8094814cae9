#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <logitless/logitless.hpp>
#include <string>

#include "io/element_type.h"

namespace logitless::cli {

// The numbers that define a loss, as the commands share them.
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
};
void add_loss_options(CLI::App& command, LossOptions& options);
// Throws UsageError for a budget that is not a size.
void apply(const LossOptions& options, Problem& problem);

// A size, or "fastest", of which it makes LOGITLESS_FASTEST. Throws UsageError naming the option.
uint64_t parse_budget(const std::string& option, const std::string& text);

// "f32", "bf16", "f16" or "f64", as --dtype takes them and results show them.
logitless_dtype parse_dtype(const std::string& option, const std::string& text);
const char* dtype_text(logitless_dtype dtype);
int64_t dtype_bytes(logitless_dtype dtype);

// Between files and the library.
logitless_dtype dtype_from_element(ElementType type);  // of real, I32 and I64 elements only
ElementType element_from_dtype(logitless_dtype dtype);

}  // namespace logitless::cli
