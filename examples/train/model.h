#pragma once

// The language model without its head: embedding, gated linear recurrences with RMS norm and residual, final
// RMS norm. `forward` gives the hidden states that the head turns into a loss; `backward` takes their
// gradient.

#include <cstdint>
#include <span>
#include <vector>

#include "train/model_parameters.h"

namespace logitless::train {

class Model {
 public:
  Model(const ModelConfig& config, uint64_t seed);

  // `tokens` [batch * length], sequences one after the other. Returns hidden [batch * length, D], valid until
  // the next call. Every sequence starts from an empty state.
  std::span<const float> forward(std::span<const int32_t> tokens, int64_t batch, int64_t length);

  // Gradients of the last forward into every parameter's `gradient` but the head's. `d_hidden` is
  // overwritten.
  void backward(std::span<const float> d_hidden);

  const ModelConfig& config() const { return config_; }
  std::vector<Parameter>& parameters() { return parameters_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  Parameter& head() { return parameters_[head_place(config_)]; }

 private:
  Parameter& embedding() { return parameters_[kEmbedding]; }
  Parameter& of_layer(int64_t layer, LayerParameter which) { return parameters_[place_of(layer, which)]; }
  Parameter& final_norm() { return parameters_[final_norm_place(config_)]; }

  struct LayerActivations {
    std::vector<float> in;           // [N, D] the residual stream before the layer
    std::vector<float> inverse_rms;  // [N]
    std::vector<float> normed;       // [N, D]
    std::vector<float> projected;    // [N, 4H]
    std::vector<float> state;        // [N, H]
    std::vector<float> output;       // [N, H]
  };

  void resize(int64_t batch, int64_t length);
  void layer_forward(int64_t layer, std::vector<float>& out);
  void layer_backward(int64_t layer, std::vector<float>& d_residual);

  ModelConfig config_;
  std::vector<Parameter> parameters_;
  std::vector<LayerActivations> activations_;
  std::vector<int32_t> tokens_;
  int64_t batch_ = 0;
  int64_t length_ = 0;
  std::vector<float> last_;  // [N, D] the residual stream after the last layer
  std::vector<float> last_inverse_rms_;
  std::vector<float> hidden_;  // [N, D]
  // Scratch of the backward.
  std::vector<float> d_residual_;   // [N, D]
  std::vector<float> d_normed_;     // [N, D]
  std::vector<float> d_output_;     // [N, H]
  std::vector<float> d_projected_;  // [N, 4H]
};

}  // namespace logitless::train
