#include "commands/loss_options.h"

#include <array>

#include "commands/number_checks.h"
#include "commands/units.h"
#include "options.h"

namespace logitless::cli {
namespace {

struct DTypeRow {
  logitless_dtype dtype;
  ElementType element;
  const char* text;
  const char* long_text;
};
constexpr std::array<DTypeRow, 6> kDTypes{{
    {LOGITLESS_F32, ElementType::kF32, "f32", "float32"},
    {LOGITLESS_BF16, ElementType::kBF16, "bf16", "bfloat16"},
    {LOGITLESS_F16, ElementType::kF16, "f16", "float16"},
    {LOGITLESS_F64, ElementType::kF64, "f64", "float64"},
    {LOGITLESS_I32, ElementType::kI32, "i32", "int32"},
    {LOGITLESS_I64, ElementType::kI64, "i64", "int64"},
}};

const DTypeRow& row_of(logitless_dtype dtype) {
  return kDTypes.at(static_cast<size_t>(dtype));
}

}  // namespace

void add_loss_options(CLI::App& command, LossOptions& options) {
  const std::string group = "The loss";
  command
      .add_option("--scale", options.scale,
                  "Factor of the logits before bias and softcap: a model's logit scale")
      ->group(group)
      ->capture_default_str();
  command
      .add_option("--softcap", options.softcap, "Logits become softcap * tanh(logits / softcap); 0: no cap")
      ->check(non_negative())
      ->group(group)
      ->capture_default_str();
  command.add_option("--temperature", options.temperature, "Logits are divided by it, after the softcap")
      ->check(positive())
      ->group(group)
      ->capture_default_str();
  command
      .add_option("--label-smoothing", options.label_smoothing,
                  "Share of the target spread over the vocabulary")
      ->check(CLI::Range(0.0, 1.0))
      ->group(group)
      ->capture_default_str();
  command.add_option("--z-loss", options.z_loss, "Factor of lse^2 added to each token's loss")
      ->check(non_negative())
      ->group(group)
      ->capture_default_str();
  command
      .add_option("--compute-dtype", options.compute_dtype,
                  "bf16 or f16: hidden and classifier are rounded to it for the products, a part at a time")
      ->group(group);
  command
      .add_flag("--tf32", options.allow_tf32, "CUDA: products of float32 operands may round these to TF32")
      ->group(group);
  command
      .add_flag(
          "--batch-invariant", options.batch_invariant,
          "A row's loss and statistics have the same bits in any batch, under any budget and in any pass")
      ->group(group);
  command.add_option(
      "--budget", options.budget,
      "Most bytes of workspace, such as 256MiB or 1GB; never exceeded. fastest: as the fastest plan wants. "
      "Default: the smallest plan within 3% of the fastest, and no more than a quarter of the float32 logits "
      "+ 64 MiB while that costs at most 6%");
}

void apply(const LossOptions& options, Problem& problem) {
  problem.scale = options.scale;
  problem.softcap = options.softcap;
  problem.temperature = options.temperature;
  problem.label_smoothing = options.label_smoothing;
  problem.z_loss = options.z_loss;
  if (!options.compute_dtype.empty()) {
    problem.compute_dtype = parse_dtype("--compute-dtype", options.compute_dtype);
  }
  problem.allow_tf32 = options.allow_tf32;
  problem.batch_invariant = options.batch_invariant;
  if (!options.budget.empty()) {
    problem.max_workspace_bytes = parse_budget("--budget", options.budget);
    if (problem.max_workspace_bytes == 0)
      throw UsageError("--budget: expected more than 0 bytes, got '" + options.budget + "'");
  }
}

uint64_t parse_budget(const std::string& option, const std::string& text) {
  return text == "fastest" ? LOGITLESS_FASTEST : parse_size(option, text);
}

logitless_dtype parse_dtype(const std::string& option, const std::string& text) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype <= LOGITLESS_F64 && (text == row.text || text == row.long_text)) return row.dtype;
  }
  throw UsageError(option + ": expected f32, bf16, f16 or f64, got '" + text + "'");
}

const char* dtype_text(logitless_dtype dtype) {
  return row_of(dtype).text;
}

int64_t dtype_bytes(logitless_dtype dtype) {
  return bits_of(row_of(dtype).element) / 8;
}

logitless_dtype dtype_from_element(ElementType type) {
  for (const DTypeRow& row : kDTypes) {
    if (row.element == type) return row.dtype;
  }
  throw std::logic_error("no dtype for elements of type " + std::string(name_of(type)));
}

ElementType element_from_dtype(logitless_dtype dtype) {
  return row_of(dtype).element;
}

}  // namespace logitless::cli
