#include "train/adamw.h"

#include <cmath>

namespace logitless::train {

AdamW::AdamW(const AdamWConfig& config, const std::vector<Parameter>& parameters) : config_(config) {
  for (const Parameter& parameter : parameters) {
    moments_.push_back(
        {std::vector<float>(parameter.value.size()), std::vector<float>(parameter.value.size())});
  }
}

void AdamW::step(std::vector<Parameter>& parameters, double learning_rate) {
  ++steps_;
  const auto beta1 = static_cast<float>(config_.beta1);
  const auto beta2 = static_cast<float>(config_.beta2);
  const auto steps = static_cast<double>(steps_);
  // m / (1 - beta1^t) and v / (1 - beta2^t), folded into two scalars.
  const auto rate = static_cast<float>(learning_rate / (1.0 - std::pow(config_.beta1, steps)));
  const auto second_scale = static_cast<float>(1.0 / (1.0 - std::pow(config_.beta2, steps)));
  const auto epsilon = static_cast<float>(config_.epsilon);
  for (size_t p = 0; p < parameters.size(); ++p) {
    Parameter& parameter = parameters[p];
    const auto shrink =
        static_cast<float>(parameter.decays ? 1.0 - learning_rate * config_.weight_decay : 1.0);
    float* value = parameter.value.data();
    const float* gradient = parameter.gradient.data();
    float* first = moments_[p].first.data();
    float* second = moments_[p].second.data();
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < parameter.size(); ++i) {
      const float g = gradient[i];
      first[i] = beta1 * first[i] + (1.0F - beta1) * g;
      second[i] = beta2 * second[i] + (1.0F - beta2) * g * g;
      value[i] = shrink * value[i] - rate * first[i] / (std::sqrt(second[i] * second_scale) + epsilon);
    }
  }
}

}  // namespace logitless::train
