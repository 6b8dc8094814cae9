#pragma once
#include <string>

#include "cuda/engines/engine.h"

namespace logitless::cuda {

// Compares an engine with the portable one on a few small heads with 16-bit operands, and with all epilogues.
// Returns how they differ, or why they could not be compared; empty if they agree. It has its own stream and
// memory, and touches no capture.
std::string self_check(const Engine& engine, const Device& device);

// Returns the device, which is this ordinal's. If it would use an engine by default that no such device has
// tried, the engine is checked first, once in a process. One that fails becomes the device's untrusted
// engine, with a warning on stderr.
const Device& checked_device(int ordinal);

}  // namespace logitless::cuda
