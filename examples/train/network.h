#pragma once

// What is trained: a model, its head and its optimizer. On the host (host_network.cpp), or on a CUDA device
// (cuda/); all begin with the same parameters and compute the same numbers but for rounding.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "train/batches.h"
#include "train/head.h"
#include "train/parameter.h"
#include "train/trainer_config.h"

namespace logitless::train {

struct HeadLoss {
  double loss;
  double head_seconds;  // in the head, gradients included
};

class Network {
 public:
  virtual ~Network() = default;
  Network() = default;
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // Mean loss of a batch of the configuration's shape, and the gradients of all parameters.
  virtual HeadLoss loss_and_gradients(const Batch& batch) = 0;
  // One step of the optimizer with these gradients; what it does is done when this returns.
  virtual void update(double learning_rate) = 0;
  // Mean loss alone.
  virtual double loss(const Batch& batch) = 0;

  virtual const Head& head() const = 0;

  // In host memory, where a device's are copied to. Valid until the next call that computes.
  virtual const std::vector<Parameter>& parameters() = 0;  // the head's is the last
  virtual std::span<const float> hidden() = 0;             // [N, D] of the last batch
  virtual std::span<const float> d_hidden() = 0;           // [N, D] of the last with gradients
};

// Computes with the processors of this machine.
std::unique_ptr<Network> make_host_network(const TrainerConfig& config, std::unique_ptr<Head> head);

}  // namespace logitless::train
