#pragma once

// One training run: a network and its data. Two runs with the same configuration on one device differ by
// their head alone.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "train/batches.h"
#include "train/network.h"
#include "train/trainer_config.h"

namespace logitless::train {

struct StepResult {
  double loss;
  double seconds;
  double head_seconds;  // of these, in the head
  // Only when asked for, and not in `seconds`:
  double gradient_norm;  // sum of |g| over all parameters
  double logit_bound;    // largest 2-norm of a row of hidden times that of a row of the classifier
};

struct Validation {
  double loss;
  double seconds;
};

class Trainer {
 public:
  // The texts must outlive the trainer.
  Trainer(const TrainerConfig& config, std::span<const int32_t> train, std::span<const int32_t> validation,
          std::unique_ptr<Network> network);

  // One step; throws std::runtime_error when the loss is not finite.
  StepResult step(double learning_rate, bool with_bounds = false);
  Validation validate();

  Network& network() { return *network_; }
  int64_t head_gradient_bytes() const;
  const std::vector<Batch>& validation_batches() const { return validation_; }

 private:
  TrainerConfig config_;
  RandomBatches batches_;
  std::vector<Batch> validation_;
  std::unique_ptr<Network> network_;
};

// Sum of |x| in double precision, the same with any number of threads.
double sum_of_magnitudes(std::span<const float> values);

}  // namespace logitless::train
