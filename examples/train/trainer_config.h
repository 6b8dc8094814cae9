#pragma once

#include <cstdint>

#include "train/adamw.h"
#include "train/batches.h"
#include "train/model_parameters.h"

namespace logitless::train {

struct TrainerConfig {
  ModelConfig model;
  AdamWConfig optimizer;
  BatchShape batch{16, 256};
  int64_t validation_batches = 2;
  uint64_t seed = 1;
};

}  // namespace logitless::train
