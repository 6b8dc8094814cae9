#include <algorithm>
#include <cmath>

#include "commands/loss.h"
#include "io/tensor_files.h"
#include "support/format.h"

namespace logitless::cli {
namespace {

[[noreturn]] void refuse(const TensorView& tensor, const std::string& expected, const std::string& got) {
  throw FileError(tensor.name, "expected " + expected + ", got " + got);
}

void require_real(const TensorView& tensor) {
  if (!is_real(tensor.dtype))
    refuse(tensor, "dtype F32, BF16, F16 or F64", std::string(name_of(tensor.dtype)));
}

void require_shape(const TensorView& tensor, const std::vector<int64_t>& shape, const std::string& why) {
  if (tensor.shape != shape)
    refuse(tensor, "shape " + shape_text(shape) + " (" + why + ")", shape_text(tensor.shape));
}

// A vector of `count` real numbers as stats; positive: that logits can be divided by.
std::vector<std::byte> read_weights(const TensorView& tensor, int64_t count, logitless_dtype stats,
                                    bool positive = false) {
  require_real(tensor);
  if (tensor.elements() != count) {
    refuse(tensor, std::to_string(count) + " elements", "shape " + shape_text(tensor.shape));
  }
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    const double value = values.emplace_back(real_element(tensor, i));
    const bool accepted = positive ? value >= 0x1p-126 && value <= 0x1p126 : std::isfinite(value);
    if (!accepted) {
      refuse(tensor, positive ? "temperatures > 0, from 2^-126 to 2^126" : "finite weights",
             format_number(value, 9) + " at " + std::to_string(i));
    }
  }
  return encode(values, stats);
}

void check_operands(LossInputs& in) {
  require_real(in.hidden);
  require_real(in.classifier);
  if (in.hidden.shape.size() < 2) refuse(in.hidden, "shape [..., tokens, D]", shape_text(in.hidden.shape));
  if (in.classifier.shape.size() != 2) refuse(in.classifier, "shape [V, D]", shape_text(in.classifier.shape));
  in.dim = in.hidden.shape.back();
  in.vocab = in.classifier.shape.front();
  in.batch_shape.assign(in.hidden.shape.begin(), in.hidden.shape.end() - 1);
  if (in.dim < 1) refuse(in.hidden, "a last dimension of at least 1", shape_text(in.hidden.shape));
  if (in.vocab < 1) refuse(in.classifier, "at least one row", shape_text(in.classifier.shape));
  in.tokens = in.hidden.elements() / in.dim;
  require_shape(in.classifier, {in.vocab, in.dim}, "D = " + std::to_string(in.dim) + " of " + in.hidden.name);
  in.stats_dtype = in.hidden.dtype == ElementType::kF64 ? LOGITLESS_F64 : LOGITLESS_F32;
  if ((in.classifier.dtype == ElementType::kF64) != (in.stats_dtype == LOGITLESS_F64)) {
    refuse(in.classifier,
           "F64 exactly when hidden is (hidden is " + std::string(name_of(in.hidden.dtype)) + ")",
           std::string(name_of(in.classifier.dtype)));
  }
}

void check_bias(const LossInputs& in) {
  require_real(in.bias);
  require_shape(in.bias, {in.vocab}, "V = " + std::to_string(in.vocab));
  if ((in.bias.dtype == ElementType::kF64) != (in.stats_dtype == LOGITLESS_F64)) {
    refuse(in.bias, "F64 exactly when hidden is", std::string(name_of(in.bias.dtype)));
  }
}

// K of targets [..., tokens, K], with the leading dimensions of hidden or flat; 0: a token has one.
int64_t targets_per_token(const LossInputs& in, const TensorView& targets) {
  constexpr int64_t kMost = 64;
  const std::vector<int64_t> flat{in.tokens};
  if (targets.shape == in.batch_shape || targets.shape == flat) return 0;
  std::vector<int64_t> leading = targets.shape;
  if (!leading.empty()) leading.pop_back();
  if (leading != in.batch_shape && leading != flat) {
    refuse(targets,
           "shape " + shape_text(in.batch_shape) + " (as the leading dimensions of " + in.hidden.name +
               "), or with one more dimension of several targets a token",
           shape_text(targets.shape));
  }
  const int64_t count = targets.shape.back();
  if (count < 1 || count > kMost) {
    refuse(targets, "1 to " + std::to_string(kMost) + " targets a token", shape_text(targets.shape));
  }
  return count;
}

// Target k of a row of the file.
int64_t checked_target(const LossInputs& in, const TensorView& targets, int64_t row, int64_t k,
                       int64_t ignore_index) {
  const int64_t target = integer_element(targets, row * in.target_count() + k);
  if (target == ignore_index || (target >= 0 && target < in.vocab)) return target;
  refuse(targets, "targets in [0, " + std::to_string(in.vocab) + ") or " + std::to_string(ignore_index),
         std::to_string(target) + " at " +
             (in.targets_per_token == 0 ? std::to_string(row) : shape_text({row, k})));
}

// Fills targets, shifted inside their sequences, and what depends on them.
void read_targets(LossInputs& in, const TensorView& targets, const LossRequest& request) {
  if (!is_integer(targets.dtype))
    refuse(targets, "an integer dtype such as I32 or I64", std::string(name_of(targets.dtype)));
  in.targets_per_token = targets_per_token(in, targets);
  const int64_t count = in.target_count();

  int64_t length = request.problem.sequence_length;
  if (length == 0) length = in.batch_shape.size() > 1 ? in.batch_shape.back() : in.tokens;
  if (in.tokens > 0 && in.tokens % length != 0) {
    throw UsageError("--sequence-length: expected a divisor of " + std::to_string(in.tokens) +
                     " tokens, got " + std::to_string(length));
  }
  in.targets.assign(static_cast<size_t>(in.tokens * count), request.problem.ignore_index);
  for (int64_t row = 0; row < in.tokens; ++row) {
    if (row % length >= length - std::min(request.problem.shift, length))
      continue;  // no target that far ahead
    // One of the token's.
    int64_t target = request.problem.ignore_index;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t one =
          checked_target(in, targets, row + request.problem.shift, k, request.problem.ignore_index);
      in.targets[static_cast<size_t>(row * count + k)] = one;
      if (one != request.problem.ignore_index) target = one;
    }
    if (target == request.problem.ignore_index) continue;
    ++in.valid_tokens;
    const double token = in.token_weight.empty() ? 1 : in.stats_at(in.token_weight.data(), row);
    const double of_class = in.class_weight.empty() ? 1 : in.stats_at(in.class_weight.data(), target);
    in.weight_sum += token * of_class;
  }
}

// Fills the weights of several targets, which move with them.
void read_target_weights(LossInputs& in, const TensorView& weights, const TensorView& targets,
                         int64_t shift) {
  if (in.targets_per_token == 0) {
    throw UsageError("--target-weight: expected targets of shape [..., tokens, K] with it, got " +
                     shape_text(targets.shape));
  }
  require_shape(weights, targets.shape, "as " + targets.name);
  in.target_weight = read_weights(weights, targets.elements(), in.stats_dtype);
  const auto row_bytes = in.targets_per_token * dtype_bytes(in.stats_dtype);
  const auto moved = std::min(shift, in.tokens) * row_bytes;
  // Rows of which a sequence has no target that far ahead have none at all: what stays there does not count.
  std::shift_left(in.target_weight.begin(), in.target_weight.end(), moved);
}

}  // namespace

LossInputs open_loss_inputs(const LossRequest& request) {
  LossInputs in;
  const auto open = [&](const char* role, const std::string& reference) {
    TensorView tensor = open_tensor(role, reference);
    in.files.push_back(tensor.file);
    return tensor;
  };
  in.hidden = open("hidden states", request.hidden);
  in.classifier = open("classifier", request.classifier);
  check_operands(in);
  if (!request.bias.empty()) {
    in.bias = open("bias", request.bias);
    check_bias(in);
  }
  if (!request.class_weight.empty()) {
    in.class_weight = read_weights(open("class weights", request.class_weight), in.vocab, in.stats_dtype);
  }
  if (!request.token_weight.empty()) {
    in.token_weight = read_weights(open("token weights", request.token_weight), in.tokens, in.stats_dtype);
  }
  if (!request.token_temperature.empty()) {
    const TensorView temperatures = open("token temperatures", request.token_temperature);
    in.token_temperature = read_weights(temperatures, in.tokens, in.stats_dtype, true);
  }
  const TensorView targets = open("targets", request.targets);
  read_targets(in, targets, request);
  if (!request.target_weight.empty()) {
    read_target_weights(in, open("target weights", request.target_weight), targets, request.problem.shift);
  }
  return in;
}

double LossInputs::stats_at(const std::byte* stats, int64_t index) const {
  if (stats_dtype == LOGITLESS_F64) return reinterpret_cast<const double*>(stats)[index];
  return static_cast<double>(reinterpret_cast<const float*>(stats)[index]);
}

}  // namespace logitless::cli
