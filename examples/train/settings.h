#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "train/corpus.h"
#include "train/head.h"
#include "train/schedule.h"
#include "train/trainer_config.h"

namespace logitless::train {

struct Settings {
  CorpusOptions corpus;
  int64_t vocab = 32768;
  TrainerConfig trainer;  // its vocabulary is set once the vocabulary is learned
  Schedule schedule;
  double minutes = 2.5;  // of training with the fused head, if steps is 0
  int64_t steps = 0;
  int64_t compare_steps = 8;  // with both heads; 0: no comparison
  int64_t max_workspace_bytes = int64_t{64} << 20;
  HeadGradient gradient;    // of the fused head
  std::string device_note;  // for people, beside the device's name
  bool quiet = false;       // no progress on stderr
  std::filesystem::path output = "logitless-train";
};

}  // namespace logitless::train
