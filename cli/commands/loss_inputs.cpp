#include <algorithm>
#include <cmath>

#include "commands/loss.h"
#include "support/format.h"

namespace logitless::cli {
namespace {

[[noreturn]] void refuse(const StoredTensor& tensor, const std::string& expected, const std::string& got) {
  throw FileError(tensor.name, "expected " + expected + ", got " + got);
}

void require_real(const StoredTensor& tensor) {
  if (!is_real(tensor.dtype))
    refuse(tensor, "dtype F32, BF16, F16 or F64", std::string(name_of(tensor.dtype)));
}

void require_shape(const StoredTensor& tensor, const std::vector<int64_t>& shape, const std::string& why) {
  if (tensor.shape != shape)
    refuse(tensor, "shape " + shape_text(shape) + " (" + why + ")", shape_text(tensor.shape));
}

// Reads a vector of `count` real numbers as statistics. positive: they must be fit to divide logits by.
std::vector<std::byte> read_weights(const LossInputs& in, const StoredTensor& tensor, int64_t count,
                                    bool positive = false) {
  require_real(tensor);
  if (tensor.elements() != count) {
    refuse(tensor, std::to_string(count) + " elements", "shape " + shape_text(tensor.shape));
  }
  const std::vector<double> values = decode(tensor.read(), dtype_from_element(tensor.dtype));
  const auto bad = std::find_if_not(values.begin(), values.end(), [=](double value) {
    return positive ? value >= 0x1p-126 && value <= 0x1p126 : std::isfinite(value);
  });
  if (bad != values.end()) {
    refuse(tensor, positive ? "temperatures > 0, from 2^-126 to 2^126" : "finite weights",
           format_number(*bad, 9) + " at " + std::to_string(bad - values.begin()));
  }
  return encode(values, dtype_from_element(in.stats));
}

// Checks the dtype of the weight or the bias.
void require_f64_as_hidden(const LossInputs& in, const StoredTensor& tensor) {
  require_real(tensor);
  if ((tensor.dtype == ElementType::kF64) == (in.hidden.dtype == ElementType::kF64)) return;
  refuse(tensor, "F64 exactly when hidden is (hidden is " + std::string(name_of(in.hidden.dtype)) + ")",
         std::string(name_of(tensor.dtype)));
}

void check_operands(LossInputs& in) {
  require_real(in.hidden);
  require_real(in.weight);
  if (in.hidden.shape.size() < 2) refuse(in.hidden, "shape [..., tokens, D]", shape_text(in.hidden.shape));
  if (in.weight.shape.size() != 2) refuse(in.weight, "shape [V, D]", shape_text(in.weight.shape));
  in.dim = in.hidden.shape.back();
  in.vocab = in.weight.shape.front();
  in.batch_shape.assign(in.hidden.shape.begin(), in.hidden.shape.end() - 1);
  if (in.dim < 1) refuse(in.hidden, "a last dimension of at least 1", shape_text(in.hidden.shape));
  if (in.vocab < 1) refuse(in.weight, "at least one row", shape_text(in.weight.shape));
  in.tokens = in.hidden.elements() / in.dim;
  require_shape(in.weight, {in.vocab, in.dim}, "D = " + std::to_string(in.dim) + " of " + in.hidden.name);
  require_f64_as_hidden(in, in.weight);
  if (in.hidden.dtype == ElementType::kF64) in.stats = ElementType::kF64;
}

// Returns K for targets [..., tokens, K], whose leading dimensions are hidden's or flat; 0: one target a
// token.
int64_t targets_per_token(const LossInputs& in, const StoredTensor& targets) {
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

// Fills targets, shifted inside their sequences, and the fields that depend on them.
void read_targets(LossInputs& in, const StoredTensor& targets, const LossRequest& request) {
  if (!is_integer(targets.dtype))
    refuse(targets, "an integer dtype such as I32 or I64", std::string(name_of(targets.dtype)));
  in.targets_per_token = targets_per_token(in, targets);
  const int64_t count = std::max<int64_t>(in.targets_per_token, 1), ignored = request.problem.ignore_index;

  int64_t length = request.problem.sequence_length;
  if (length == 0) length = in.batch_shape.size() > 1 ? in.batch_shape.back() : in.tokens;
  if (in.tokens > 0 && in.tokens % length != 0) {
    throw UsageError("--sequence-length: expected a divisor of " + std::to_string(in.tokens) +
                     " tokens, got " + std::to_string(length));
  }
  const std::vector<std::byte> stored = targets.read();
  in.targets.assign(static_cast<size_t>(in.tokens * count), ignored);
  for (int64_t row = 0; row < in.tokens; ++row) {
    if (row % length >= length - std::min(request.problem.shift, length))
      continue;  // no target is that far ahead
    const int64_t from = row + request.problem.shift;
    int64_t last = ignored;  // last of the token's targets
    for (int64_t k = 0; k < count; ++k) {
      const int64_t target = integer_element(stored.data(), targets.dtype, from * count + k);
      in.targets[static_cast<size_t>(row * count + k)] = target;
      if (target == ignored) continue;
      last = target;
      if (target >= 0 && target < in.vocab) continue;
      refuse(targets, "targets in [0, " + std::to_string(in.vocab) + ") or " + std::to_string(ignored),
             std::to_string(target) + " at " +
                 (in.targets_per_token == 0 ? std::to_string(from) : shape_text({from, k})));
    }
    if (last == ignored) continue;
    ++in.valid_tokens;
    const auto weight = [&](const std::vector<std::byte>& weights, int64_t i) {
      return weights.empty() ? 1 : real_element(weights.data(), in.stats, i);
    };
    in.weight_sum += weight(in.token_weight, row) * weight(in.class_weight, last);
  }
}

// Fills the weights of several targets, which move with the targets.
void read_target_weights(LossInputs& in, const StoredTensor& weights, const StoredTensor& targets,
                         int64_t shift) {
  if (in.targets_per_token == 0) {
    throw UsageError("--target-weight: expected targets of shape [..., tokens, K] with it, got " +
                     shape_text(targets.shape));
  }
  require_shape(weights, targets.shape, "as " + targets.name);
  in.target_weight = read_weights(in, weights, targets.elements());
  const int64_t moved = std::min(shift, in.tokens) * in.targets_per_token * bits_of(in.stats) / 8;
  // Rows without a target that far ahead have no target, so the weights left there do not count.
  std::shift_left(in.target_weight.begin(), in.target_weight.end(), moved);
}

}  // namespace

LossInputs open_loss_inputs(const LossRequest& request) {
  LossInputs in;
  const auto open = [&](const char* role, const std::string& reference) {
    StoredTensor tensor = open_tensor(role, reference);
    in.files.push_back(tensor.file->path());
    return tensor;
  };
  const auto weights = [&](const char* role, const std::string& reference, int64_t count, bool positive) {
    if (reference.empty()) return std::vector<std::byte>{};
    return read_weights(in, open(role, reference), count, positive);
  };
  in.hidden = open("hidden states", request.hidden);
  in.weight = open("weight", request.weight);
  check_operands(in);
  if (!request.bias.empty()) {
    in.bias = open("bias", request.bias);
    require_f64_as_hidden(in, in.bias);
    require_shape(in.bias, {in.vocab}, "V = " + std::to_string(in.vocab));
    in.bias_data = in.bias.read();
  }
  in.class_weight = weights("class weights", request.class_weight, in.vocab, false);
  in.token_weight = weights("token weights", request.token_weight, in.tokens, false);
  in.token_temperature = weights("token temperatures", request.token_temperature, in.tokens, true);
  const StoredTensor targets = open("targets", request.targets);
  read_targets(in, targets, request);
  if (!request.target_weight.empty()) {
    read_target_weights(in, open("target weights", request.target_weight), targets, request.problem.shift);
  }
  in.weight_data = in.weight.read();
  return in;
}

}  // namespace logitless::cli
