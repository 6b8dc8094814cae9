#pragma once
#include <string>

#include "cuda/engines/engine.h"

namespace logitless::cuda {

// How an engine differs from the portable one, or why they could not be compared; both empty if they agree.
struct SelfCheck {
  std::string difference, why_not;
  bool passed() const { return difference.empty() && why_not.empty(); }
};

// Compares an engine with the portable one on a few small heads with 16-bit operands, in all epilogues. It
// has its own stream and memory, and touches no capture.
SelfCheck self_check(const Engine& engine, const Device& device);

// Returns the device for plans, with an engine that is requested by name (or an empty one). An engine that
// the device would use, and that no such device has tried, is checked first, once in a process. One that does
// not pass becomes the device's untrusted engine, with a warning on stderr.
Device checked_device(int ordinal, const std::string& requested);

}  // namespace logitless::cuda
