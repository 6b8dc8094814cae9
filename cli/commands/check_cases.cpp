#include "commands/check_cases.h"

#include <array>
#include <cmath>
#include <functional>
#include <random>

#include "commands/loss_options.h"
#include "io/real_element.h"

namespace logitless::cli {
namespace {

struct Shape {
  int64_t tokens, vocab, dim;
};
// One element; less than any vector; odd; just past round sizes; round.
constexpr std::array<Shape, 6> kShapes{
    {{1, 1, 1}, {3, 5, 2}, {17, 131, 33}, {65, 257, 129}, {64, 1024, 64}, {253, 770, 48}}};
constexpr std::array<Shape, 3> kLargeShapes{{{300, 5003, 257}, {40, 20011, 512}, {1030, 2049, 96}}};

constexpr std::array<std::array<logitless_dtype, 2>, 4> kPairs{{{LOGITLESS_F32, LOGITLESS_F32},
                                                                {LOGITLESS_BF16, LOGITLESS_BF16},
                                                                {LOGITLESS_F16, LOGITLESS_F16},
                                                                {LOGITLESS_BF16, LOGITLESS_F32}}};

struct OptionSet {
  const char* name;
  std::function<void(CheckCase&)> set;
};

const std::vector<OptionSet>& option_sets() {
  static const std::vector<OptionSet> kSets{
      {"plain", [](CheckCase&) {}},
      {"bias", [](CheckCase& c) { c.bias = true; }},
      {"softcap", [](CheckCase& c) { c.softcap = 5, c.scale = 1.5; }},
      {"scale", [](CheckCase& c) { c.scale = 0.25; }},
      {"temperature", [](CheckCase& c) { c.temperature = 0.3, c.softcap = 10, c.bias = true; }},
      {"token-temperature", [](CheckCase& c) { c.token_temperature = c.ignored_rows = true; }},
      {"smoothing", [](CheckCase& c) { c.label_smoothing = 0.1; }},
      {"z-loss", [](CheckCase& c) { c.z_loss = 1e-2; }},
      {"class-weight", [](CheckCase& c) { c.class_weight = true, c.label_smoothing = 0.2; }},
      {"token-weight", [](CheckCase& c) { c.token_weight = true; }},
      {"ignored-rows", [](CheckCase& c) { c.ignored_rows = true; }},
      {"shift", [](CheckCase& c) { c.shift = 2; }},
      {"sum", [](CheckCase& c) { c.sum = true; }},
      {"num-items", [](CheckCase& c) { c.num_items = 12345; }},
      {"large-logits", [](CheckCase& c) { c.logit_std = 30; }},
      {"frozen-hidden", [](CheckCase& c) { c.grad_hidden = false; }},
      {"frozen-classifier", [](CheckCase& c) { c.grad_classifier = false; }},
      {"all", [](CheckCase& c) {
         c.scale = 1.25, c.softcap = 8, c.label_smoothing = 0.1, c.z_loss = 1e-3;
         c.bias = c.class_weight = c.token_weight = c.token_temperature = c.ignored_rows = true;
         c.shift = 1;
       }}};
  return kSets;
}

std::vector<double> normal_numbers(std::mt19937_64& random, int64_t count, double std,
                                   logitless_dtype dtype) {
  std::normal_distribution<double> normal(0, std);
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = rounded(normal(random), dtype);
  return values;
}

std::vector<double> weights(std::mt19937_64& random, int64_t count) {
  std::uniform_real_distribution<double> uniform(0.25, 2);
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = rounded(uniform(random), LOGITLESS_F32);
  return values;
}

}  // namespace

std::string CheckCase::name() const {
  std::string text = std::to_string(tokens) + "x" + std::to_string(vocab) + "x" + std::to_string(dim) + " " +
                     dtype_text(hidden_dtype);
  if (classifier_dtype != hidden_dtype) text += std::string("/") + dtype_text(classifier_dtype);
  return text + " " + options;
}

std::vector<CheckCase> check_grid(bool full) {
  std::vector<CheckCase> grid;
  const auto add = [&](const Shape& shape, const OptionSet& options) {
    for (const auto& [hidden, classifier] : kPairs) {
      CheckCase c;
      c.options = options.name;
      c.tokens = shape.tokens;
      c.vocab = shape.vocab;
      c.dim = shape.dim;
      c.hidden_dtype = hidden;
      c.classifier_dtype = classifier;
      options.set(c);
      grid.push_back(c);
    }
  };
  for (const Shape& shape : kShapes) {
    for (const OptionSet& options : option_sets()) add(shape, options);
  }
  if (full) {
    for (const Shape& shape : kLargeShapes) {
      add(shape, option_sets().front());
      add(shape, option_sets().back());
    }
  }
  return grid;
}

CheckData make_data(const CheckCase& c) {
  std::mt19937_64 random(static_cast<uint64_t>(c.tokens * 1000003 + c.vocab * 1009 + c.dim));
  CheckData data;
  data.hidden = normal_numbers(random, c.tokens * c.dim, 1, c.hidden_dtype);
  data.classifier = normal_numbers(random, c.vocab * c.dim,
                                   c.logit_std / std::sqrt(static_cast<double>(c.dim)), c.classifier_dtype);
  if (c.bias) data.bias = normal_numbers(random, c.vocab, 1, c.classifier_dtype);
  if (c.class_weight) data.class_weight = weights(random, c.vocab);
  if (c.token_weight) data.token_weight = weights(random, c.tokens);
  if (c.token_temperature) data.temperature = weights(random, c.tokens);
  std::uniform_int_distribution<int64_t> ids(0, c.vocab - 1);
  for (int64_t i = 0; i < c.tokens; ++i) {
    const bool ignored = c.ignored_rows && i % 3 == 1;
    data.targets.push_back(ignored ? kCheckIgnoreIndex : ids(random));
  }
  return data;
}

int64_t shifted_target(const CheckCase& c, const CheckData& data, int64_t row) {
  const int64_t length = c.sequence_length == 0 ? c.tokens : c.sequence_length;
  if (row % length + c.shift >= length) return kCheckIgnoreIndex;
  return data.targets[static_cast<size_t>(row + c.shift)];
}

template <class T>
T loss_divisor(const CheckCase& c, const CheckData& data) {
  if (c.sum) return 1;
  if (c.num_items > 0) return static_cast<T>(c.num_items);
  const auto weight = [](const std::vector<double>& of, int64_t i) {
    return of.empty() ? T{1} : static_cast<T>(of[static_cast<size_t>(i)]);
  };
  T sum = 0;
  for (int64_t i = 0; i < c.tokens; ++i) {
    const int64_t y = shifted_target(c, data, i);
    if (y != kCheckIgnoreIndex) sum += weight(data.token_weight, i) * weight(data.class_weight, y);
  }
  return sum;
}
template float loss_divisor<float>(const CheckCase& c, const CheckData& data);
template double loss_divisor<double>(const CheckCase& c, const CheckData& data);

double rounded(double value, logitless_dtype dtype) {
  const auto narrow = static_cast<float>(value);
  switch (dtype) {
    case LOGITLESS_F32:
      return narrow;
    case LOGITLESS_BF16:
      return bf16_to_float(float_to_bf16(narrow));
    case LOGITLESS_F16:
      return f16_to_float(float_to_f16(narrow));
    default:
      return value;
  }
}

}  // namespace logitless::cli
