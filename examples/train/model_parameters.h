#pragma once

// The language model's sizes, its parameters and their first values, which are the same wherever it is
// trained.

#include <cstdint>
#include <vector>

#include "train/parameter.h"

namespace logitless::train {

struct ModelConfig {
  int64_t vocab = 0;
  int64_t dim = 256;    // D, width of embedding, residual stream and hidden states
  int64_t inner = 512;  // H, channels of one recurrence
  int64_t layers = 2;
};

// The parameters of a layer, in their order.
enum LayerParameter { kNormGain, kInProjection, kInBias, kOutProjection, kLayerParameters };

// Where a list of all parameters has them: embedding, layers, final norm, head (lm_head.weight [V, D]).
inline constexpr size_t kEmbedding = 0;
inline size_t place_of(int64_t layer, LayerParameter which) {
  return static_cast<size_t>(1 + layer * kLayerParameters + which);
}
inline size_t final_norm_place(const ModelConfig& config) {
  return place_of(config.layers, kNormGain);
}
inline size_t head_place(const ModelConfig& config) {
  return final_norm_place(config) + 1;
}

// Random, by the seed alone; gradients are 0.
std::vector<Parameter> initial_parameters(const ModelConfig& config, uint64_t seed);

int64_t parameter_count(const std::vector<Parameter>& parameters);

// Throws std::invalid_argument unless there are `count` tokens, each of the vocabulary.
void check_tokens(const ModelConfig& config, const std::vector<int32_t>& tokens, int64_t count);

}  // namespace logitless::train
