#include "commands/loss_inputs.h"

#include <cmath>
#include <cstring>

#include "commands/loss_options.h"
#include "io/file_error.h"
#include "io/real_element.h"
#include "io/tensor_source.h"
#include "options.h"

namespace headroom::cli {
namespace {

const std::vector<std::string> kHiddenNames{"hidden", "hidden_states", "last_hidden_state"};
// The names of the head, and of the embedding that it may be tied to, in common checkpoints.
const std::vector<std::string> kHeadNames{"lm_head.weight", "head.weight", "output.weight", "classifier",
                                          "embed_out.weight"};
const std::vector<std::string> kEmbeddingNames{"model.embed_tokens.weight",
                                               "shared.weight",
                                               "transformer.wte.weight",
                                               "wte.weight",
                                               "backbone.embedding.weight",
                                               "backbone.embeddings.weight",
                                               "model.embeddings.weight",
                                               "language_model.model.embed_tokens.weight",
                                               "model.language_model.embed_tokens.weight"};
const std::vector<std::string> kTargetNames{"targets", "labels", "input_ids"};

// What a tied head has of its own is not what the model computes with, and an embedding that is not tied is
// no head.
std::vector<std::string> classifier_names(std::optional<bool> tied) {
  std::vector<std::string> names = kHeadNames;
  if (tied != false) {
    names.insert(tied == true ? names.begin() : names.end(), kEmbeddingNames.begin(), kEmbeddingNames.end());
  }
  return names;
}

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

// A vector of `count` real numbers as stats.
std::vector<std::byte> read_weights(const TensorView& tensor, int64_t count, headroom_dtype stats) {
  require_real(tensor);
  if (tensor.elements() != count) {
    refuse(tensor, std::to_string(count) + " elements", "shape " + shape_text(tensor.shape));
  }
  std::vector<std::byte> out(static_cast<size_t>(count * dtype_bytes(stats)));
  for (int64_t i = 0; i < count; ++i) {
    const double value = real_element(tensor, i);
    if (!std::isfinite(value))
      refuse(tensor, "finite weights", std::to_string(value) + " at " + std::to_string(i));
    if (stats == HEADROOM_F64) {
      std::memcpy(&out[static_cast<size_t>(i) * sizeof value], &value, sizeof value);
    } else {
      const auto narrow = static_cast<float>(value);
      std::memcpy(&out[static_cast<size_t>(i) * sizeof narrow], &narrow, sizeof narrow);
    }
  }
  return out;
}

// As read_weights(), of numbers that logits can be divided by.
std::vector<std::byte> read_temperatures(const TensorView& tensor, int64_t count, headroom_dtype stats) {
  std::vector<std::byte> out = read_weights(tensor, count, stats);
  for (int64_t i = 0; i < count; ++i) {
    const double value = stats_at(out, stats, i);
    if (value >= 0x1p-126 && value <= 0x1p126) continue;
    refuse(tensor, "temperatures > 0, from 2^-126 to 2^126",
           std::to_string(value) + " at " + std::to_string(i));
  }
  return out;
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
  in.stats_dtype = in.hidden.dtype == ElementType::kF64 ? HEADROOM_F64 : HEADROOM_F32;
  if ((in.classifier.dtype == ElementType::kF64) != (in.stats_dtype == HEADROOM_F64)) {
    refuse(in.classifier,
           "F64 exactly when hidden is (hidden is " + std::string(name_of(in.hidden.dtype)) + ")",
           std::string(name_of(in.classifier.dtype)));
  }
}

void open_bias(LossInputs& in, TensorSource& source, const std::string& reference) {
  in.bias = source.open("bias", reference, {"lm_head.bias", "bias"});
  require_real(in.bias);
  require_shape(in.bias, {in.vocab}, "V = " + std::to_string(in.vocab));
  if ((in.bias.dtype == ElementType::kF64) != (in.stats_dtype == HEADROOM_F64)) {
    refuse(in.bias, "F64 exactly when hidden is", std::string(name_of(in.bias.dtype)));
  }
}

// Fills targets, shifted inside their sequences, and what depends on them.
void read_targets(LossInputs& in, const TensorView& targets, const LossFiles& files) {
  if (!is_integer(targets.dtype))
    refuse(targets, "an integer dtype such as I32 or I64", std::string(name_of(targets.dtype)));
  const bool flat = targets.shape.size() == 1 && targets.elements() == in.tokens;
  if (!flat) require_shape(targets, in.batch_shape, "as the leading dimensions of " + in.hidden.name);

  int64_t length = files.sequence_length;
  if (length == 0) length = in.batch_shape.size() > 1 ? in.batch_shape.back() : in.tokens;
  if (in.tokens > 0 && in.tokens % length != 0) {
    throw UsageError("--sequence-length: expected a divisor of " + std::to_string(in.tokens) +
                     " tokens, got " + std::to_string(length));
  }
  in.targets.assign(static_cast<size_t>(in.tokens), files.ignore_index);
  for (int64_t row = 0; row < in.tokens; ++row) {
    if (row % length >= length - std::min(files.shift, length)) continue;  // no target that far ahead
    const int64_t target = integer_element(targets, row + files.shift);
    if (target == files.ignore_index) continue;
    if (target < 0 || target >= in.vocab) {
      refuse(targets,
             "targets in [0, " + std::to_string(in.vocab) + ") or " + std::to_string(files.ignore_index),
             std::to_string(target) + " at " + std::to_string(row + files.shift));
    }
    in.targets[static_cast<size_t>(row)] = target;
    ++in.valid_tokens;
    const double token = in.token_weight.empty() ? 1 : stats_at(in.token_weight, in.stats_dtype, row);
    const double of_class = in.class_weight.empty() ? 1 : stats_at(in.class_weight, in.stats_dtype, target);
    in.weight_sum += token * of_class;
  }
}

}  // namespace

LossInputs open_loss_inputs(const LossFiles& files) {
  TensorSource source;
  LossInputs in;
  in.hidden = source.open("hidden states", files.hidden, kHiddenNames);
  in.classifier = source.open("classifier", files.classifier, classifier_names(files.tied));
  check_operands(in);
  if (!files.bias.empty()) open_bias(in, source, files.bias);
  if (!files.class_weight.empty()) {
    const TensorView weights = source.open("class weights", files.class_weight, {"class_weight"});
    in.class_weight = read_weights(weights, in.vocab, in.stats_dtype);
  }
  if (!files.token_weight.empty()) {
    const TensorView weights = source.open("token weights", files.token_weight, {"token_weight"});
    in.token_weight = read_weights(weights, in.tokens, in.stats_dtype);
  }
  if (!files.token_temperature.empty()) {
    const TensorView temperatures =
        source.open("token temperatures", files.token_temperature, {"token_temperature", "temperature"});
    in.token_temperature = read_temperatures(temperatures, in.tokens, in.stats_dtype);
  }
  read_targets(in, source.open("targets", files.targets, kTargetNames), files);
  in.files = source.files();
  return in;
}

double stats_at(const std::vector<std::byte>& stats, headroom_dtype dtype, int64_t index) {
  if (dtype == HEADROOM_F64) {
    double value;
    std::memcpy(&value, &stats[static_cast<size_t>(index) * sizeof value], sizeof value);
    return value;
  }
  float value;
  std::memcpy(&value, &stats[static_cast<size_t>(index) * sizeof value], sizeof value);
  return value;
}

}  // namespace headroom::cli
