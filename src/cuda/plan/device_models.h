#pragma once
#include <string>

#include "cuda/runtime/device.h"

namespace logitless::cuda {

// Returns a device model by its short name, such as "h200", for plans without a device. Returns null if the
// name is unknown.
const Device* device_model(const std::string& name);

// Sets the vendor's rates of a present device if it is one of the models: with the same name and number of
// processors, and about as much memory.
void add_rates(Device& device);

// Returns "a100, h100, ...".
std::string known_models();

}  // namespace logitless::cuda
