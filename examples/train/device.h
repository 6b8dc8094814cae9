#pragma once

// Where a run computes. It makes the parts of a run that depend on it.

#include <logitless/logitless.hpp>

#include <cstdint>
#include <memory>
#include <string>

#include "train/head.h"
#include "train/network.h"
#include "train/trainer_config.h"

namespace logitless::train {

class Device {
 public:
  virtual ~Device() = default;
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual std::string name() const = 0;            // for people
  virtual std::string matrix_library() const = 0;  // that multiplies the matrices, with its version

  virtual std::unique_ptr<Head> materialized_head() = 0;
  virtual std::unique_ptr<Head> fused_head(Context context, int64_t max_workspace_bytes,
                                           const HeadGradient& gradient) = 0;
  // The head must be of this device, too.
  virtual std::unique_ptr<Network> network(const TrainerConfig& config, std::unique_ptr<Head> head) = 0;

  // The most memory that was held since the last reset; what that counts is its name.
  virtual std::string peak_name() const = 0;
  virtual int64_t peak_bytes() const = 0;
  virtual bool reset_peak() = 0;  // false: it goes on counting from the start
};

// Threads of what runs on the host, beside a GPU as well; 0: as many as OpenMP takes.
void set_host_threads(int threads);

// This machine's processors and memory. Throws std::runtime_error where oneDNN cannot be opened.
std::unique_ptr<Device> make_host_device();

}  // namespace logitless::train
