#pragma once

// One training run: a model, its optimizer, its data and a head. Two runs with the same configuration differ
// by their head alone.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "train/adamw.h"
#include "train/batches.h"
#include "train/head.h"
#include "train/model.h"

namespace headroom::train {

struct TrainerConfig {
  ModelConfig model;
  AdamWConfig optimizer;
  BatchShape batch{16, 256};
  int64_t validation_batches = 2;
  uint64_t seed = 1;
};

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
          std::unique_ptr<Head> head);

  // One step; throws std::runtime_error when the loss is not finite.
  StepResult step(double learning_rate, bool with_bounds = false);
  Validation validate();

  Model& model() { return model_; }
  const Head& head() const { return *head_; }
  int64_t head_gradient_bytes() const;
  std::span<const float> d_hidden() const { return d_hidden_; }
  const std::vector<Batch>& validation_batches() const { return validation_; }
  // Hidden states of a batch, valid until the next call of anything here.
  std::span<const float> hidden_of(const Batch& batch);
  double loss_of(const Batch& batch);

 private:
  HeadInput head_input(std::span<const float> hidden, const Batch& batch);

  TrainerConfig config_;
  Model model_;
  AdamW optimizer_;
  RandomBatches batches_;
  std::vector<Batch> validation_;
  std::unique_ptr<Head> head_;
  std::vector<float> d_hidden_;  // [N, D]
};

// Sum of |x| in double precision, the same with any number of threads.
double sum_of_magnitudes(std::span<const float> values);

}  // namespace headroom::train
