#include "core/validate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>

#include "core/number_text.h"
#include "core/plan.h"
#include "core/status.h"
#include "core/top_k.h"

namespace logitless {
namespace {

void require(bool ok, const char* argument, const std::string& expected, const std::string& got) {
  if (!ok) throw_invalid(argument, expected, got);
}

// A run allocates nothing unless it fails, so its checks make strings only then.
void require(bool ok, const char* argument, const char* expected, const char* got) {
  if (!ok) throw_invalid(argument, expected, got);
}

std::string text(int64_t value) {
  return std::to_string(value);
}

std::string text(double value) {
  return number_text(value);
}

void check_range(const char* argument, int64_t value, int64_t low, int64_t high) {
  require(value >= low && value <= high, argument, "a number in [" + text(low) + ", " + text(high) + "]",
          text(value));
}

void check_range(const char* argument, double value, double low, double high) {
  const bool is_open = std::isinf(high);
  require(std::isfinite(value) && value >= low && value <= high, argument,
          !is_open          ? "a number in [" + text(low) + ", " + text(high) + "]"
          : std::isinf(low) ? "a finite number"
          : low > 0         ? "a finite number > 0"
                            : "a finite number >= " + text(low),
          text(value));
}

// Checks each option by itself.
void check_ranges(const Problem& p) {
#define LOGITLESS_OPTION_INTEGER(name, NAME, type, default_value, lowest, highest, ...) \
  check_range(#name, static_cast<int64_t>(p.name), int64_t{lowest}, int64_t{highest});
#define LOGITLESS_OPTION_REAL(name, NAME, default_value, lowest, highest, ...) \
  check_range(#name, p.name, double{lowest}, double{highest});
#include "logitless/options.def"
}

// Checks a real option of this name by itself.
void check_option(std::string_view option, double value) {
#define LOGITLESS_OPTION_REAL(name, NAME, default_value, lowest, highest, ...) \
  if (option == #name) check_range(#name, value, double{lowest}, double{highest});
#include "logitless/options.def"
}

// Products of two dimensions and an element size must fit into 63 bits, with room to spare.
void check_product(const char* argument, int64_t a, int64_t b) {
  if (a == 0 || b <= (int64_t{1} << 58) / a) return;
  throw_invalid(argument, "a product of dimensions below 2^58", text(a) + " x " + text(b));
}

void check_accumulate(const char* argument, bool accumulate, bool wanted, DType dtype) {
  if (!accumulate) return;
  require(wanted, argument, "0 without the gradient itself", "1");
  require(dtype == DType::kF32 || dtype == DType::kF64, argument, "a float32 (or float64) gradient to add to",
          dtype_name(dtype));
}

void check_shapes(const Problem& p) {
  constexpr int64_t kMost = int64_t{1} << 40;
  check_range("vocab", p.vocab, p.in_group() ? 0 : 1, kMost);
  check_product("tokens x vocab", p.tokens, p.vocab);
  check_product("tokens x hidden", p.tokens, p.hidden);
  check_product("vocab x hidden", p.vocab, p.hidden);
  check_range("vocab_total", p.vocab_total, std::max<int64_t>(p.vocab, 1), kMost);
  check_range("vocab_start", p.vocab_start, 0, p.vocab_total - p.vocab);
  check_range("sequence_length", p.sequence_length, p.tokens == 0 ? 0 : 1, kMost);
  require(p.tokens == 0 || p.tokens % p.sequence_length == 0, "sequence_length",
          "a divisor of tokens = " + text(p.tokens), text(p.sequence_length));
}

// Without a group, its options must have their defaults.
void check_group(const Problem& p) {
  if (!p.in_group()) {
    require(p.group_vocab == 0, "group_vocab", "0 without group_size", text(p.group_vocab));
    require(p.group_d_hidden == GroupDHidden::kPart, "group_d_hidden", "0 without group_size",
            text(static_cast<int64_t>(p.group_d_hidden)));
    return;
  }
  check_range("group_vocab", p.group_vocab, std::max<int64_t>(p.vocab, 1), p.vocab_total);
  require(p.group_vocab >= (p.vocab_total + p.group_size - 1) / p.group_size, "group_vocab",
          "at least vocab_total / group_size = " + text(p.vocab_total) + " / " + text(int64_t{p.group_size}) +
              " (it is that of the largest shard)",
          text(p.group_vocab));
  check_product("tokens x group_vocab", p.tokens, p.group_vocab);
  check_product("group_vocab x hidden", p.group_vocab, p.hidden);
  if (p.group_d_hidden == GroupDHidden::kPart) return;
  require(p.has.d_hidden, "group_d_hidden", "0 (LOGITLESS_D_HIDDEN_PART) without d_hidden",
          text(static_cast<int64_t>(p.group_d_hidden)));
  require(!p.accumulate.d_hidden, "d_hidden.accumulate", "0 where d_hidden is added up over a group", "1");
  require(
      p.group_d_hidden == GroupDHidden::kSum || p.tokens % p.group_size == 0, "tokens",
      "a multiple of group_size = " + text(int64_t{p.group_size}) + " (every rank gets its part of d_hidden)",
      text(p.tokens));
}

void check_dtypes(const Problem& p) {
  const bool fp64 = p.dtype.hidden == DType::kF64;
  check_float("hidden.dtype", p.dtype.hidden, fp64);
  check_float("weight.dtype", p.dtype.weight, fp64);
  if (p.has.bias) check_float("bias.dtype", p.dtype.bias, fp64);
  if (p.has.d_hidden) check_float("d_hidden.dtype", p.dtype.d_hidden, fp64);
  if (p.has.d_weight) check_float("d_weight.dtype", p.dtype.d_weight, fp64);
  if (p.has.d_bias) check_float("d_bias.dtype", p.dtype.d_bias, fp64);
  check_compute_dtype(p.compute_dtype, fp64, /*may_be_fp8=*/true);
  require(p.dtype.targets == DType::kI32 || p.dtype.targets == DType::kI64, "targets.dtype", "int32 or int64",
          dtype_name(p.dtype.targets));
}

// Divides the factors of the logits by the temperature, so that the same problem has none.
Problem without_temperature(Problem p) {
  const LogitFactors factors =
      checked_factors({p.scale, p.softcap, p.bias_scale}, p.temperature, p.has.temperature, p.dtype.hidden);
  p.scale = factors.scale;
  p.softcap = factors.softcap;
  p.bias_scale = factors.bias_scale;
  p.temperature = 1;
  return p;
}

void check_options(const Problem& p) {
  require(p.num_items == 0 || p.reduction == Reduction::kMean, "num_items", "0 unless the reduction is mean",
          text(p.num_items));
  require(!p.has.d_bias || p.has.bias, "d_bias", "a plan with bias", "none");
  check_accumulate("d_hidden.accumulate", p.accumulate.d_hidden, p.has.d_hidden, p.dtype.d_hidden);
  check_accumulate("d_weight.accumulate", p.accumulate.d_weight, p.has.d_weight, p.dtype.d_weight);
  check_accumulate("d_bias.accumulate", p.accumulate.d_bias, p.has.d_bias, p.dtype.d_bias);
}

void check_sparsification(const Problem& p) {
  const bool sparsified = p.gradient != GradientMethod::kExact;
  if (!sparsified) return;
  require(
      !p.batch_invariant, "batch_invariant",
      "0 with sparsified gradients (their sums are relative to an lse estimate, which depends on other rows)",
      "1");
  require(p.label_smoothing == 0 || p.softcap == 0, "label_smoothing",
          "0 with sparsified gradients and a softcap (every element of a row then has a part of its own)",
          text(p.label_smoothing));
}

// A screen estimates lse and the kept elements' part of it, and nothing else of a row.
void check_screen(const Problem& p) {
  require(p.screens() || !p.has.screen_weight, "screen_weight", "none without a screen", "one");
  require(p.has.screen_weight || p.screen_weight_bytes == 0, "screen_weight_bytes",
          "0 in a plan without screen_weight", std::to_string(p.screen_weight_bytes));
  if (!p.screens()) return;
  require(p.gradient != GradientMethod::kExact, "screen", "none (0) unless gradient is sparsified",
          "fp8 (1)");
  require(p.dtype.hidden != DType::kF64, "screen", "none (0) with float64 operands", "fp8 (1)");
  require(p.pass != Pass::kBackward && !p.has.saved, "screen",
          "none (0) where gradients come after the loss (a screen needs both in one pass)", "fp8 (1)");
  require(!p.is_shard() && !p.in_group(), "screen", "none (0) for a shard of the vocabulary", "fp8 (1)");
  require(p.label_smoothing == 0, "label_smoothing", "0 with a screen", text(p.label_smoothing));
  require(p.top_k == 0, "top_k", "0 with a screen", text(p.top_k));
#define LOGITLESS_NO_SUM(name, ...) \
  require(!p.has.name, #name, "none with a screen (it is a statistic of the whole row)", "one");
  LOGITLESS_NO_SUM(entropy)
  LOGITLESS_NO_SUM(mean_logit)
  LOGITLESS_NO_SUM(log_sum_sq_probs)
  LOGITLESS_NO_SUM(argmax)
#undef LOGITLESS_NO_SUM
}

// Draws, top_k and several targets have logits of their own, from operands as they are.
void check_fp8(const Problem& p) {
  if (!p.has_fp8_logits()) return;
  require(p.gradient == GradientMethod::kExact, "compute_dtype",
          "another with sparsified gradients (a screen gives them 8-bit logits)", "fp8");
  require(p.top_k == 0, "top_k", "0 where compute_dtype is fp8", text(p.top_k));
  require(p.targets_per_row == 0, "targets_per_row", "0 where compute_dtype is fp8", text(p.targets_per_row));
  require(p.num_samples == 0, "num_samples", "0 where compute_dtype is fp8", text(p.num_samples));
}

void check_pass(const Problem& p) {
  require(!p.has.saved || p.pass != Pass::kForwardBackward, "saved",
          "none in a plan whose pass is forward_backward", "one");
  require(p.has.saved || p.saved_bytes == 0, "saved_bytes", "0 in a plan without saved",
          std::to_string(p.saved_bytes));
  // A backward pass may choose fewer columns than all, and would read others than were written.
  require(p.pass != Pass::kForward || p.saved_bytes < kFastest, "saved_bytes",
          "the size that the plan of the backward pass says, in a forward pass", "INT64_MAX");
  if (p.pass == Pass::kForward) {
    require(!p.has_gradients(), "pass", "backward or forward_backward when gradients are wanted", "forward");
  } else {
    require(p.has_gradients(), "pass", "forward when no gradient is wanted", "a pass with gradients");
  }
  if (p.pass == Pass::kForwardBackward) {
    require(!p.is_unmerged_shard(), "pass", "forward, then backward, for a shard of the vocabulary",
            "forward_backward");
  }
#define LOGITLESS_CHECK(name)                                             \
  require(p.pass == Pass::kBackward || !p.has.grad_##name, "grad_" #name, \
          "none in a plan outside the backward pass", "one");
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_CHECK)
#undef LOGITLESS_CHECK
}

void check_top_k(const Problem& p) {
  const int64_t most = std::min(kMostTopK, p.in_group() ? p.vocab_total : p.vocab);
  require(p.top_k <= most, "top_k",
          "0 (none) or a number in [1, " + text(most) + "] (the smaller one of " + text(kMostTopK) +
              (p.in_group() ? " and vocab_total)" : " and vocab)"),
          text(p.top_k));
  if (p.top_k == 0) return;
  require(p.pass == Pass::kForward, "top_k", "0 in a pass with gradients (it is an option of forward passes)",
          text(p.top_k));
  require(!p.is_unmerged_shard(), "top_k", "0 for a shard of the vocabulary without group_size",
          text(p.top_k));
  require(!p.has.saved, "top_k", "0 in a forward pass with saved", text(p.top_k));
  require(!p.batch_invariant, "top_k", "0 with batch_invariant (whose passes all make the same sums)",
          text(p.top_k));
}

void check_num_samples(const Problem& p) {
  if (p.num_samples == 0) return;
  const std::string got = text(p.num_samples);
  require(p.pass == Pass::kForward, "num_samples",
          "0 in a pass with gradients (it is an option of forward passes)", got);
  require(!p.in_group(), "num_samples",
          "0 in a group (sample from each shard without group_size, and merge by sampled_keys)", got);
  require(!p.has.saved, "num_samples", "0 in a forward pass with saved", got);
  require(!p.screens(), "num_samples", "0 with a screen", got);
  require(p.top_k == 0, "num_samples", "0 with top_k", got);
  require(p.vocab_total < int64_t{1} << 32, "num_samples",
          "0 with 2^32 ids or more (noise has 32 bits of an id)", got);
  require(!p.batch_invariant, "num_samples", "0 with batch_invariant (whose passes all make the same sums)",
          got);
}

void check_sample_mask(const Problem& p) {
  if (!p.has.sample_mask) return;
  require(p.num_samples > 0 || p.top_k > 0, "sample_mask", "none without num_samples and top_k", "one");
  require(!p.in_group(), "sample_mask", "none in a group", "one");
  require(p.targets_per_row == 0, "sample_mask", "none with targets_per_row", "one");
}

void check_targets_per_row(const Problem& p) {
  if (p.targets_per_row == 0) return;
  require(!p.has.class_weight, "class_weight",
          "none with targets_per_row (multiply the targets' weights by their class weights)", "one");
  require(!p.is_unmerged_shard(), "targets_per_row", "0 for a shard of the vocabulary without group_size",
          text(p.targets_per_row));
  require(p.gradient == GradientMethod::kExact, "targets_per_row", "0 with sparsified gradients",
          text(p.targets_per_row));
}

void need(const void* pointer, bool condition, const char* argument, const char* why) {
  if (condition && pointer == nullptr)
    throw_invalid(argument, std::string("a pointer (") + why + ")", "null");
}

void check_stride(const char* argument, int64_t* stride, int64_t rows, int64_t row_length, const void* data) {
  if (data == nullptr) return;
  if (*stride == 0) *stride = row_length;
  if (*stride < row_length)
    throw_invalid(argument, "at least the row length " + text(row_length), text(*stride));
  check_product(argument, rows, *stride);
}

// A shard's statistics are merged before any output of a whole vocabulary is made.
void check_unmerged_shard(const Problem& p, const Buffers& b) {
  enum { INPUT, UPSTREAM, STATISTIC, OUTPUT, GRADIENT };
#define LOGITLESS_TENSOR(name, NAME, element, dtype, role, ...)                                    \
  require(role != OUTPUT || b.name == nullptr, #name,                                              \
          "null for a shard of the vocabulary without group_size (merge the row statistics, then " \
          "loss_from_row_stats)",                                                                  \
          "a pointer");
#include "logitless/tensors.def"
  const bool rows = p.tokens > 0;
  need(b.max, rows, "max", "a shard of the vocabulary");
  const WantedSums sums = wanted_sums(p);
#define LOGITLESS_NEED(name, ...) need(b.name, rows&& sums.name, #name, "a shard of the vocabulary");
  LOGITLESS_ROW_SUMS(LOGITLESS_NEED)
#undef LOGITLESS_NEED
  need(b.sampled_keys, rows && p.num_samples > 0 && b.sampled_ids != nullptr, "sampled_keys",
       "a shard of the vocabulary");
}

}  // namespace

void check_float(const char* argument, DType dtype, bool is_float64) {
  require(is_float(dtype), argument, "a floating point dtype", dtype_name(dtype));
  require((dtype == DType::kF64) == is_float64, argument,
          is_float64 ? "float64 (hidden is float64)" : "float32, bfloat16 or float16 (hidden is not float64)",
          dtype_name(dtype));
}

void check_compute_dtype(DType dtype, bool is_float64, bool may_be_fp8) {
  const bool is_short =
      dtype == DType::kBF16 || dtype == DType::kF16 || (may_be_fp8 && dtype == DType::kE4M3);
  require(dtype == DType::kF32 || (!is_float64 && is_short), "compute_dtype",
          is_float64   ? "float32 (operands as they are) with float64 operands"
          : may_be_fp8 ? "bfloat16, float16, fp8, or float32 (operands as they are)"
                       : "bfloat16, float16, or float32 (operands as they are)",
          dtype_name(dtype));
}

// Other factors than those of float64 are float32, and so are their inverses.
LogitFactors checked_factors(const LogitFactors& given, double temperature, bool of_rows,
                             DType hidden_dtype) {
  check_option("scale", given.scale);
  check_option("softcap", given.softcap);
  check_option("temperature", temperature);
  const bool is_float64 = hidden_dtype == DType::kF64;
  const double least = is_float64 ? std::numeric_limits<double>::min() : 0x1p-126;
  const double most = is_float64 ? std::numeric_limits<double>::max() : 0x1p126;
  const auto in_range = [&](double factor) { return factor >= least && factor <= most; };
  if (!is_float64) {
    const std::string why = "] without float64 operands (it is used as float32)";
    require(std::fabs(given.scale) <= most, "scale", "a magnitude in [0, " + text(most) + why,
            text(given.scale));
    require(given.is_linear() || in_range(given.softcap), "softcap",
            "0 or a number in [" + text(least) + ", " + text(most) + why, text(given.softcap));
  }
  require(temperature == 1 || !of_rows, "temperature", "1 beside temperatures of rows, which take its place",
          text(temperature));
  LogitFactors factors = given;
  factors.scale /= temperature;
  factors.softcap /= temperature;
  factors.bias_scale /= temperature;
  require(in_range(temperature) && in_range(1 / temperature) && std::fabs(factors.scale) <= most &&
              (given.is_linear() || in_range(factors.softcap)),
          "temperature",
          "a number T in [" + text(least) + ", " + text(most) +
              "] with softcap / T in that range and |scale| / T no larger",
          text(temperature));
  const bool vanishes = !is_float64 && std::fabs(given.scale) < least;
  if (vanishes && temperature != 1) factors.scale = 0;
  return factors;
}

void check_allowed(const Problem& p, const Buffers& b) {
#define LOGITLESS_TENSOR(name, NAME, element, dtype, role, shape, planned, allowed, only, ...) \
  require(b.name == nullptr || (allowed), #name, "null " only, "a pointer");
#include "logitless/tensors.def"
}

Problem validated(Problem p) {
  if (p.vocab_total == 0) p.vocab_total = p.vocab;
  if (p.sequence_length == 0) p.sequence_length = p.tokens;
  if (p.in_group() && p.group_vocab == 0) p.group_vocab = p.vocab;
  check_ranges(p);
  check_shapes(p);
  check_dtypes(p);
  p = without_temperature(p);
  check_options(p);
  check_sparsification(p);
  check_screen(p);
  check_fp8(p);
  check_pass(p);
  check_top_k(p);
  check_num_samples(p);
  check_sample_mask(p);
  check_group(p);
  check_targets_per_row(p);
  return p;
}

Buffers validated(const Problem& p, Buffers b) {
#define LOGITLESS_TENSOR(name, NAME, element, dtype, role, shape, planned, allowed, only, needed, when, doc) \
  need(b.name, needed, #name, when);
#include "logitless/tensors.def"
  check_stride("hidden.stride", &b.hidden_stride, p.tokens, p.hidden, b.hidden);
  check_stride("weight.stride", &b.weight_stride, p.vocab, p.hidden, b.weight);
  check_stride("d_hidden.stride", &b.d_hidden_stride, p.tokens, p.hidden, b.d_hidden);
  check_stride("d_weight.stride", &b.d_weight_stride, p.vocab, p.hidden, b.d_weight);
  if (p.needs_forward() && p.is_unmerged_shard()) check_unmerged_shard(p, b);
  check_allowed(p, b);
  require(!p.screens() || b.sum_exp == nullptr, "sum_exp", "null with a screen (lse has the whole sum)",
          "a pointer");
  require(p.group_d_hidden == GroupDHidden::kPart || p.tokens == 0 || b.d_hidden_stride == p.hidden,
          "d_hidden.stride", "rows without gaps (ranks add them up)", "a longer one");
  return b;
}

}  // namespace logitless
