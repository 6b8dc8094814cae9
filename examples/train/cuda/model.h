#pragma once

// The language model of train/model.h on a device.

#include <cstdint>
#include <vector>

#include "train/cuda/memory.h"
#include "train/cuda/session.h"
#include "train/model_parameters.h"
#include "train/recurrence.h"
#include "train/trainer_config.h"

namespace logitless::train::cuda {

struct DeviceParameter {
  Memory<float> value;
  Memory<float> gradient;
};

class DeviceModel {
 public:
  // `initial` as initial_parameters() has them.
  DeviceModel(Session& session, const TrainerConfig& config, const std::vector<Parameter>& initial);

  // As Model's; tokens are in host memory. Hidden states are in hidden(). Nothing is waited for but the
  // tokens' copy.
  void forward(const std::vector<int32_t>& tokens);
  // As Model's; `d_hidden` [N, D] is on the device.
  void backward(const float* d_hidden);

  const Memory<float>& hidden() const { return hidden_; }
  std::vector<DeviceParameter>& parameters() { return parameters_; }
  DeviceParameter& head() { return parameters_.back(); }

 private:
  struct LayerActivations {
    Memory<float> in;           // [N, D] the residual stream before the layer
    Memory<float> inverse_rms;  // [N]
    Memory<float> normed;       // [N, D]
    Memory<float> projected;    // [N, 4H]
    Memory<float> state;        // [N, H]
    Memory<float> output;       // [N, H]
  };

  const DeviceParameter& of_layer(int64_t layer, LayerParameter which) const {
    return parameters_[place_of(layer, which)];
  }
  const DeviceParameter& final_norm() const { return parameters_[final_norm_place(config_)]; }
  // The rows of each token of a batch, for the embedding's gradient.
  void group_by_token(const std::vector<int32_t>& tokens);
  void layer_forward(int64_t layer, float* out);
  void layer_backward(int64_t layer);

  Session& session_;
  ModelConfig config_;
  RecurrenceShape shape_;
  int64_t rows_;
  std::vector<DeviceParameter> parameters_;
  std::vector<LayerActivations> activations_;
  Memory<int32_t> tokens_;        // [N]
  int64_t different_tokens_ = 0;  // of the last batch
  Memory<int32_t> token_ids_;     // [N], as RowsOfTokens has them
  Memory<int32_t> token_starts_;  // [N + 1]
  Memory<int32_t> token_places_;  // [N]
  Memory<float> last_;            // [N, D] the residual stream after the last layer
  Memory<float> last_inverse_rms_;
  Memory<float> hidden_;  // [N, D]
  // Scratch of the backward.
  Memory<float> d_residual_;   // [N, D]
  Memory<float> d_normed_;     // [N, D]
  Memory<float> d_output_;     // [N, H]
  Memory<float> d_projected_;  // [N, 4H]
};

}  // namespace logitless::train::cuda
