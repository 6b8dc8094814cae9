#pragma once

#include <cstdint>
#include <vector>

#include "train/parameter.h"

namespace logitless::train {

// AdamW: Adam with bias correction and weight decay decoupled from the gradient (Loshchilov and Hutter).
struct AdamWConfig {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
};

class AdamW {
 public:
  AdamW(const AdamWConfig& config, const std::vector<Parameter>& parameters);

  // One update of every parameter from its gradient; `parameters` as given to the constructor.
  void step(std::vector<Parameter>& parameters, double learning_rate);

 private:
  struct Moments {
    std::vector<float> first;
    std::vector<float> second;
  };
  AdamWConfig config_;
  std::vector<Moments> moments_;
  int64_t steps_ = 0;
};

}  // namespace logitless::train
