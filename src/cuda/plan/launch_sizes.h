#pragma once
#include <cstdint>
#include <map>
#include <string>

#include "core/problem.h"
#include "cuda/engines/engine.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {

// A plan's launches over the whole vocabulary, as far as their sizes go. A launch is of a chunk of tokens.
class LaunchSizes {
 public:
  LaunchSizes(const Problem& problem, const Device& device, const Engine& engine)
      : p_(problem), device_(device), engine_(engine) {}

  LogitsArgs of(const EpilogueArgs& epilogue, int64_t chunk) const;
  // Slots of the row statistics; 1 without any.
  int64_t slots(int64_t chunk) const;
  // The engine's configuration for the launch that takes most of the time, for people.
  std::string config(int64_t chunk) const;

 private:
  const Problem& p_;
  const Device& device_;
  const Engine& engine_;
  mutable std::map<int64_t, int64_t> slots_;  // by chunk
};

}  // namespace logitless::cuda
