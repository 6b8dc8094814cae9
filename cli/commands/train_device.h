#pragma once
#include <memory>
#include <string>

#include "commands/context.h"
#include "options.h"
#include "train/device.h"

namespace logitless::cli {

// Where `train` computes: the device, and a context on its memory.
struct TrainDevice {
  std::unique_ptr<train::Device> device;
  Context context;
  std::string cuda;  // "cuda:N"; empty: the host
  std::string note;  // why it is no GPU, where that was left to this program; else empty
};

// Of "auto", "cpu", "cuda" or "cuda:N". "cuda" is the first usable GPU, and so is "auto", which is the host
// where there is none. Throws UsageError for anything else, and for a --backend that works elsewhere;
// std::runtime_error where what was asked for is not usable.
TrainDevice open_train_device(const GlobalOptions& globals, const std::string& text);

}  // namespace logitless::cli
