#include "train/model_parameters.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "train/random.h"
#include "train/recurrence.h"

namespace logitless::train {
namespace {

void fill_normal(Parameter& parameter, double deviation, Random& random) {
  for (float& x : parameter.value) x = static_cast<float>(deviation * random.normal());
}

void fill(Parameter& parameter, float value) {
  std::fill(parameter.value.begin(), parameter.value.end(), value);
}

std::vector<Parameter> zero_parameters(const ModelConfig& config) {
  const auto [vocab, dim, inner, layers] = config;
  std::vector<Parameter> parameters;
  parameters.emplace_back("embedding.weight", std::vector<int64_t>{vocab, dim}, true);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    const int64_t projected = kProjectedGroups * inner;
    parameters.emplace_back(prefix + "norm.weight", std::vector<int64_t>{dim}, false);
    parameters.emplace_back(prefix + "in_proj.weight", std::vector<int64_t>{projected, dim}, true);
    parameters.emplace_back(prefix + "in_proj.bias", std::vector<int64_t>{projected}, false);
    parameters.emplace_back(prefix + "out_proj.weight", std::vector<int64_t>{dim, inner}, true);
  }
  parameters.emplace_back("norm.weight", std::vector<int64_t>{dim}, false);
  parameters.emplace_back("lm_head.weight", std::vector<int64_t>{vocab, dim}, true);
  return parameters;
}

}  // namespace

std::vector<Parameter> initial_parameters(const ModelConfig& config, uint64_t seed) {
  std::vector<Parameter> parameters = zero_parameters(config);
  Random random(seed);
  const auto [vocab, dim, inner, layers] = config;
  const double in_deviation = 1.0 / std::sqrt(static_cast<double>(dim));
  const double out_deviation = 1.0 / std::sqrt(static_cast<double>(2 * layers * inner));
  fill_normal(parameters[kEmbedding], 0.5, random);
  for (int64_t layer = 0; layer < layers; ++layer) {
    fill(parameters[place_of(layer, kNormGain)], 1.0F);
    fill_normal(parameters[place_of(layer, kInProjection)], in_deviation, random);
    fill_normal(parameters[place_of(layer, kOutProjection)], out_deviation, random);
    // Memory lengths 1 / (1 - a) from 1.1 to 64 tokens, evenly spread on a log scale over the channels.
    std::vector<float>& bias = parameters[place_of(layer, kInBias)].value;
    for (int64_t channel = 0; channel < inner; ++channel) {
      const double place = (static_cast<double>(channel) + 0.5) / static_cast<double>(inner);
      const double length = 1.1 * std::pow(64.0 / 1.1, place);
      bias[static_cast<size_t>(kForgetGate * inner + channel)] = static_cast<float>(std::log(length - 1.0));
    }
  }
  fill(parameters[final_norm_place(config)], 1.0F);
  fill_normal(parameters[head_place(config)], 0.02, random);
  return parameters;
}

int64_t parameter_count(const std::vector<Parameter>& parameters) {
  int64_t count = 0;
  for (const Parameter& parameter : parameters) count += parameter.size();
  return count;
}

void check_tokens(const ModelConfig& config, const std::vector<int32_t>& tokens, int64_t count) {
  if (static_cast<int64_t>(tokens.size()) != count) {
    throw std::invalid_argument("tokens: expected batch * length = " + std::to_string(count) + ", got " +
                                std::to_string(tokens.size()));
  }
  for (const int32_t token : tokens) {
    if (token < 0 || token >= config.vocab) {
      throw std::invalid_argument("tokens: expected values in [0, " + std::to_string(config.vocab) +
                                  "), got " + std::to_string(token));
    }
  }
}

}  // namespace logitless::train
