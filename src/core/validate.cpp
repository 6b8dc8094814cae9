#include "core/validate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/number_text.h"
#include "core/status.h"
#include "core/top_k.h"

namespace logitless {
namespace {

void require(bool ok, const char* argument, const std::string& expected, const std::string& got) {
  if (!ok) throw_invalid(argument, expected, got);
}

// Of a run, which allocates nothing unless it fails: the strings are made late.
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

void check_non_negative(const char* argument, double value) {
  require(std::isfinite(value) && value >= 0, argument, "a finite number >= 0", text(value));
}

// Factors of logits that are computed in float32, as are the factors' inverses.
void check_float_factors(const Problem& p) {
  constexpr double kLeast = 0x1p-126;
  constexpr double kMost = 0x1p126;
  const std::string why = "] without float64 operands, as it is used as float32";
  require(std::fabs(p.scale) <= kMost, "scale", "a magnitude in [0, " + text(kMost) + why, text(p.scale));
  require(p.softcap == 0 || (p.softcap >= kLeast && p.softcap <= kMost), "softcap",
          "0 or a number in [" + text(kLeast) + ", " + text(kMost) + why, text(p.softcap));
}

void check_temperature(const Problem& p) {
  const double t = p.temperature;
  require(std::isfinite(t) && t > 0, "temperature", "a finite number > 0", text(t));
  require(t == 1 || !p.has_temperature, "temperature", "1 with has_temperature, whose values take its place",
          text(t));
  const bool fp64 = p.hidden_dtype == DType::kF64;
  const double least = fp64 ? std::numeric_limits<double>::min() : 0x1p-126;
  const double most = fp64 ? std::numeric_limits<double>::max() : 0x1p126;
  const auto in_range = [&](double factor) { return factor >= least && factor <= most; };
  require(in_range(t) && in_range(1 / t) && std::fabs(p.scale / t) <= most &&
              (p.softcap == 0 || in_range(p.softcap / t)),
          "temperature",
          "a number that it, and softcap over it, are in [" + text(least) + ", " + text(most) +
              "], and scale over it no more",
          text(t));
}

// Over the temperature: the same logits without one.
Problem without_temperature(Problem p) {
  const bool vanishes = p.hidden_dtype != DType::kF64 && std::fabs(p.scale) < 0x1p-126;
  p.scale = vanishes ? 0 : p.scale / p.temperature;
  p.softcap /= p.temperature;
  p.bias_scale /= p.temperature;
  p.temperature = 1;
  return p;
}

// Products of two dimensions and an element size must fit into 63 bits with room to spare.
void check_product(const char* argument, int64_t a, int64_t b) {
  if (a == 0 || b <= (int64_t{1} << 58) / a) return;
  throw_invalid(argument, "a product of dimensions below 2^58", text(a) + " x " + text(b));
}

void check_float(const char* argument, DType dtype, bool fp64_problem) {
  require(is_float(dtype), argument, "a floating point dtype", dtype_name(dtype));
  require((dtype == DType::kF64) == fp64_problem, argument,
          fp64_problem ? "float64, as hidden_dtype is float64"
                       : "float32, bfloat16 or float16, as hidden_dtype is not float64",
          dtype_name(dtype));
}

void check_accumulate(const char* argument, bool accumulate, bool wanted, DType dtype) {
  if (!accumulate) return;
  require(wanted, argument, "false without the gradient itself", "true");
  require(dtype == DType::kF32 || dtype == DType::kF64, argument, "a float32 (or float64) gradient to add to",
          dtype_name(dtype));
}

void check_shapes(const Problem& p) {
  constexpr int64_t kMost = int64_t{1} << 40;
  check_range("tokens", p.tokens, 0, kMost);
  check_range("vocab", p.vocab, p.in_group() ? 0 : 1, kMost);
  check_range("hidden", p.hidden, 1, kMost);
  check_product("tokens x vocab", p.tokens, p.vocab);
  check_product("tokens x hidden", p.tokens, p.hidden);
  check_product("vocab x hidden", p.vocab, p.hidden);
  check_range("vocab_total", p.vocab_total, std::max<int64_t>(p.vocab, 1), kMost);
  check_range("vocab_start", p.vocab_start, 0, p.vocab_total - p.vocab);
  check_range("shift", p.shift, 0, kMost);
  check_range("sequence_length", p.sequence_length, p.tokens == 0 ? 0 : 1, kMost);
  require(p.tokens == 0 || p.tokens % p.sequence_length == 0, "sequence_length",
          "a divisor of tokens = " + text(p.tokens), text(p.sequence_length));
}

// Of a problem that is no rank's, its fields are the defaults.
void check_group(const Problem& p) {
  constexpr int64_t kMostRanks = 1 << 20;
  check_range("group_size", p.group_size, 0, kMostRanks);
  if (!p.in_group()) {
    require(p.group_vocab == 0, "group_vocab", "0 without group_size", text(p.group_vocab));
    require(p.group_d_hidden == GroupDHidden::kPart, "group_d_hidden", "0 without group_size",
            text(static_cast<int64_t>(p.group_d_hidden)));
    return;
  }
  check_range("group_vocab", p.group_vocab, std::max<int64_t>(p.vocab, 1), p.vocab_total);
  require(p.group_vocab >= (p.vocab_total + p.group_size - 1) / p.group_size, "group_vocab",
          "at least vocab_total / group_size, " + text(p.vocab_total) + " / " + text(int64_t{p.group_size}) +
              ", as it is that of the largest shard",
          text(p.group_vocab));
  check_product("tokens x group_vocab", p.tokens, p.group_vocab);
  check_product("group_vocab x hidden", p.group_vocab, p.hidden);
  if (p.group_d_hidden == GroupDHidden::kPart) return;
  require(p.want_d_hidden, "group_d_hidden", "0 (LOGITLESS_D_HIDDEN_PART) without want_d_hidden",
          text(static_cast<int64_t>(p.group_d_hidden)));
  require(!p.accumulate_d_hidden, "accumulate_d_hidden", "0 where d_hidden is added up over a group", "1");
  require(p.group_d_hidden == GroupDHidden::kSum || p.tokens % p.group_size == 0, "tokens",
          "a multiple of group_size = " + text(int64_t{p.group_size}) +
              ", as every rank gets its part of d_hidden",
          text(p.tokens));
}

void check_dtypes(const Problem& p) {
  const bool fp64 = p.hidden_dtype == DType::kF64;
  check_float("hidden_dtype", p.hidden_dtype, fp64);
  check_float("classifier_dtype", p.classifier_dtype, fp64);
  if (p.has_bias) check_float("bias_dtype", p.bias_dtype, fp64);
  if (p.want_d_hidden) check_float("d_hidden_dtype", p.d_hidden_dtype, fp64);
  if (p.want_d_classifier) check_float("d_classifier_dtype", p.d_classifier_dtype, fp64);
  if (p.want_d_bias) check_float("d_bias_dtype", p.d_bias_dtype, fp64);
  require(p.compute_dtype == DType::kF32 ||
              (!fp64 && (p.compute_dtype == DType::kBF16 || p.compute_dtype == DType::kF16)),
          "compute_dtype",
          fp64 ? "float32 (operands as they are) with float64 operands"
               : "bfloat16, float16, or float32 (operands as they are)",
          dtype_name(p.compute_dtype));
  require(p.target_dtype == DType::kI32 || p.target_dtype == DType::kI64, "target_dtype", "int32 or int64",
          dtype_name(p.target_dtype));
}

void check_options(const Problem& p) {
  require(std::isfinite(p.scale), "scale", "a finite number", text(p.scale));
  check_non_negative("softcap", p.softcap);
  if (p.hidden_dtype != DType::kF64) check_float_factors(p);
  check_temperature(p);
  check_non_negative("z_loss", p.z_loss);
  check_non_negative("num_items", p.num_items);
  require(p.label_smoothing >= 0 && p.label_smoothing <= 1, "label_smoothing", "a number in [0, 1]",
          text(p.label_smoothing));
  require(p.num_items == 0 || p.reduction == Reduction::kMean, "num_items", "0 unless the reduction is mean",
          text(p.num_items));
  require(!p.want_d_bias || p.has_bias, "want_d_bias", "a problem with a bias", "none");
  check_accumulate("accumulate_d_hidden", p.accumulate_d_hidden, p.want_d_hidden, p.d_hidden_dtype);
  check_accumulate("accumulate_d_classifier", p.accumulate_d_classifier, p.want_d_classifier,
                   p.d_classifier_dtype);
  check_accumulate("accumulate_d_bias", p.accumulate_d_bias, p.want_d_bias, p.d_bias_dtype);
}

void check_thinning(const Problem& p) {
  const bool thinned = p.gradient != GradientMethod::kExact;
  require(!p.keeps_draws || (thinned && p.pass != Pass::kForwardBackward), "keeps_draws",
          "false unless the gradient is thinned and the pass forward or backward", "true");
  if (!thinned) return;
  require(!p.batch_invariant, "batch_invariant",
          "0 with thinned gradients, whose sums are relative to a guess that other rows have a part in", "1");
  require(p.threshold > 0 && p.threshold <= 1, "threshold", "a number in (0, 1]", text(p.threshold));
  // Weights are float32: a threshold that is 0 or has few digits there would not be the one of the draw.
  constexpr double kLeast = std::numeric_limits<float>::min();
  require(p.threshold >= kLeast, "threshold", "at least " + text(kLeast) + ", the least normal float32",
          text(p.threshold));
  require(p.label_smoothing == 0 || p.softcap == 0, "label_smoothing",
          "0 with thinned gradients and a softcap: every element of a row then has a part of its own",
          text(p.label_smoothing));
}

void check_pass(const Problem& p) {
  if (p.pass == Pass::kForward) {
    require(!p.has_gradients(), "pass", "backward or forward_backward when gradients are wanted", "forward");
  } else {
    require(p.has_gradients(), "pass", "forward when no gradient is wanted", "a pass with gradients");
  }
  if (p.pass == Pass::kForwardBackward) {
    require(!p.is_open_shard(), "pass", "forward, then backward, for a shard of the vocabulary",
            "forward_backward");
  }
#define LOGITLESS_CHECK(name)                                                 \
  require(p.pass == Pass::kBackward || !p.has_grad_##name, "has_grad_" #name, \
          "false outside the backward pass", "true");
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_CHECK)
#undef LOGITLESS_CHECK
}

void check_top_k(const Problem& p) {
  const int64_t most = std::min(kMostTopK, p.in_group() ? p.vocab_total : p.vocab);
  require(p.top_k >= 0 && p.top_k <= most, "top_k",
          "0 (none) or a number in [1, " + text(most) + "], the smaller one of " + text(kMostTopK) +
              (p.in_group() ? " and vocab_total" : " and vocab"),
          text(p.top_k));
  if (p.top_k == 0) return;
  require(p.pass == Pass::kForward, "top_k",
          "0 in a pass with gradients, as it is an option of forward passes", text(p.top_k));
  require(!p.is_open_shard(), "top_k", "0 for a shard of the vocabulary without group_size", text(p.top_k));
  require(!p.keeps_draws, "top_k", "0 in a forward pass that keeps draws", text(p.top_k));
  require(!p.batch_invariant, "top_k", "0 with batch_invariant, whose passes all make the same sums",
          text(p.top_k));
}

void check_targets_per_row(const Problem& p) {
  require(p.targets_per_row >= 0 && p.targets_per_row <= kMostTargetsPerRow, "targets_per_row",
          "0 (one target a row) or a number in [1, " + text(kMostTargetsPerRow) +
              "]; probabilities of the whole vocabulary are not taken",
          text(p.targets_per_row));
  if (p.targets_per_row == 0) return;
  require(!p.has_class_weight, "has_class_weight",
          "0 with targets_per_row: multiply the weights of the targets by those of their classes", "1");
  require(!p.is_open_shard(), "targets_per_row", "0 for a shard of the vocabulary without group_size",
          text(p.targets_per_row));
  require(p.gradient == GradientMethod::kExact, "targets_per_row", "0 with thinned gradients",
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

void check_shard_buffers(const Problem& p, const Buffers& b) {
#define LOGITLESS_REFUSE(name, ...)                                                                \
  require(b.name == nullptr, #name,                                                                \
          "null for a shard of the vocabulary without group_size (merge the row statistics, then " \
          "losses_from_row_stats)",                                                                \
          "a pointer");
  LOGITLESS_REFUSE(loss)
  LOGITLESS_ROW_OUTPUTS(LOGITLESS_REFUSE)
  LOGITLESS_REFUSE(lse_low)
  LOGITLESS_REFUSE(correct_count)
#undef LOGITLESS_REFUSE
  const bool rows = p.tokens > 0;
  need(b.max, rows, "max", "a shard of the vocabulary");
  const WantedSums sums = wanted_sums(p);
#define LOGITLESS_NEED(name, ...) need(b.name, rows&& sums.name, #name, "a shard of the vocabulary");
  LOGITLESS_ROW_SUMS(LOGITLESS_NEED)
#undef LOGITLESS_NEED
}

// Outputs of a forward pass.
void check_row_buffers(const Problem& p, const Buffers& b) {
  if (p.is_open_shard()) check_shard_buffers(p, b);
  check_row_outputs(p, b);
#define LOGITLESS_CHECK(name, part, kind, wanted, option, term) \
  require(b.name == nullptr || (wanted), #name, "null " option, "a pointer");
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_CHECK)
#undef LOGITLESS_CHECK
  require(p.want_argmax || b.argmax == nullptr, "argmax", "null unless want_argmax", "a pointer");
}

}  // namespace

void check_row_outputs(const Problem& p, const Buffers& b) {
#define LOGITLESS_CHECK(name, type, wanted, option, formula) \
  require(b.name == nullptr || (wanted), #name, "null " option, "a pointer");
  LOGITLESS_ROW_OUTPUTS(LOGITLESS_CHECK)
#undef LOGITLESS_CHECK
  require(p.want_argmax || b.correct_count == nullptr, "correct_count", "null unless want_argmax",
          "a pointer");
  require(p.targets_per_row == 0 || (b.is_top1 == nullptr && b.correct_count == nullptr),
          "is_top1, correct_count", "null with targets_per_row, as none of several targets is the right one",
          "a pointer");
}

Problem validated(Problem p) {
  if (p.vocab_total == 0) p.vocab_total = p.vocab;
  if (p.sequence_length == 0) p.sequence_length = p.tokens;
  if (p.in_group() && p.group_vocab == 0) p.group_vocab = p.vocab;
  check_shapes(p);
  check_dtypes(p);
  check_options(p);
  check_thinning(p);
  check_pass(p);
  check_top_k(p);
  check_group(p);
  check_targets_per_row(p);
  return p.temperature == 1 ? p : without_temperature(p);
}

Buffers validated(const Problem& p, Buffers b) {
  const bool rows = p.tokens > 0;
  need(b.hidden, rows, "hidden", "tokens > 0");
  const bool columns = p.vocab > 0;  // a rank's shard may be empty
  need(b.classifier, columns, "classifier", "vocab > 0");
  need(b.targets, rows, "targets", "tokens > 0");
  need(b.bias, columns && p.has_bias, "bias", "has_bias");
  need(b.class_weight, p.has_class_weight, "class_weight", "has_class_weight");
  need(b.token_weight, rows && p.has_token_weight, "token_weight", "has_token_weight");
  need(b.temperature, rows && p.has_temperature, "temperature", "has_temperature");
  require(b.target_weight == nullptr || p.targets_per_row > 0, "target_weight",
          "null without targets_per_row", "a pointer");
  check_stride("hidden_stride", &b.hidden_stride, p.tokens, p.hidden, b.hidden);
  check_stride("classifier_stride", &b.classifier_stride, p.vocab, p.hidden, b.classifier);
  check_stride("d_hidden_stride", &b.d_hidden_stride, p.tokens, p.hidden, b.d_hidden);
  check_stride("d_classifier_stride", &b.d_classifier_stride, p.vocab, p.hidden, b.d_classifier);
  if (p.needs_forward()) {
    check_row_buffers(p, b);
  } else {
    need(b.lse, rows, "lse", "an input of the backward pass");
    need(b.entropy, rows && p.has_grad_entropy, "entropy", "an input of the backward pass with grad_entropy");
  }
  require(p.top_k > 0 || (b.top_ids == nullptr && b.top_log_probs == nullptr), "top_ids, top_log_probs",
          "null without top_k", "a pointer");
  require(b.num_items == nullptr || p.reduction == Reduction::kMean, "num_items",
          "null unless the reduction is mean", "a pointer");
  require(b.target_log_probs == nullptr || (p.targets_per_row > 0 && p.needs_forward()), "target_log_probs",
          "null unless targets_per_row is given and the pass is a forward one", "a pointer");
  need(b.grad_loss, rows && p.pass == Pass::kBackward && p.reduction == Reduction::kNone, "grad_loss",
       "reduction none");
#define LOGITLESS_NEED(name) need(b.grad_##name, rows&& p.has_grad_##name, "grad_" #name, "has_grad_" #name);
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_NEED)
#undef LOGITLESS_NEED
  need(b.draws, rows && p.keeps_draws, "draws", "keeps_draws");
  require(p.is_thinned() || (b.seed == nullptr && b.draws == nullptr), "draws, seed",
          "null without thinned gradients", "a pointer");
  require((p.is_thinned() && p.needs_backward()) || (b.kept_count == nullptr && b.draw_variance == nullptr),
          "kept_count, draw_variance", "null without a pass that makes thinned gradients", "a pointer");
  require(!p.in_group() || (b.kept_count == nullptr && b.draw_variance == nullptr),
          "kept_count, draw_variance", "null in a group of ranks, of which each knows its own elements alone",
          "a pointer");
  need(b.d_hidden, rows && p.want_d_hidden, "d_hidden", "want_d_hidden");
  need(b.d_classifier, columns && p.want_d_classifier, "d_classifier", "want_d_classifier");
  need(b.d_bias, columns && p.want_d_bias, "d_bias", "want_d_bias");
  require(p.group_d_hidden == GroupDHidden::kPart || !rows || b.d_hidden_stride == p.hidden,
          "d_hidden_stride", "rows without gaps, which ranks add up", "a longer one");
  return b;
}

}  // namespace logitless
