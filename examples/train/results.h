#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "train/agreement.h"

namespace logitless::train {

struct TextFacts {
  std::string source;
  int64_t files = 0;
  int64_t bytes = 0;
  int64_t validation_bytes = 0;
  int64_t train_tokens = 0;
  int64_t validation_tokens = 0;
  int64_t vocabulary = 0;
  double seconds = 0.0;  // to read, learn the vocabulary and encode
};

struct DeviceFacts {
  std::string name;
  std::string matrix_library;
  std::string peak_name;
};

// What one head did; entry k of a vector belongs to step k + 1.
struct HeadRun {
  std::string name;
  std::string description;
  std::vector<double> loss;
  std::vector<double> seconds;
  std::vector<double> head_seconds;
  std::vector<int64_t> validation_step;  // 0: before training
  std::vector<double> validation_loss;
  int64_t workspace_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t peak_bytes = 0;  // the most that was held while this head trained, as DeviceFacts name it
  int64_t head_bytes() const { return workspace_bytes + gradient_bytes; }
};

struct Results {
  DeviceFacts device;
  TextFacts text;
  int64_t parameters = 0;
  int64_t tokens_per_step = 0;
  std::optional<HeadRun> materialized;
  HeadRun fused;
  std::optional<Agreement> agreement;
  bool peaks_are_separate = true;  // peak_bytes could be reset between the runs
  int stop_signal = 0;             // that ended training early; 0: none
  int64_t planned_steps = 0;
  double training_seconds = 0.0;  // of the fused run, validation included
  double checkpoint_loss = 0.0;   // of the checkpoint's hidden and targets
  double total_seconds = 0.0;
};

// Of the steps but the first, which touches the memory for the first time. 0 without any.
double median(std::vector<double> values);
double median_step_seconds(const std::vector<double>& seconds);

}  // namespace logitless::train
