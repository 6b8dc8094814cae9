#pragma once
#include <string>

#include "cuda/runtime/device.h"

namespace logitless::cuda {

// A device of a model by its short name, such as "h200", for plans where there is none; null when the name is
// not known.
const Device* device_model(const std::string& name);

// The vendor's rates of a device that is here, where it is one of the models: with that name, so many
// processors and about as much memory.
void add_rates(Device& device);

// "a100, h100, ..."
std::string known_models();

}  // namespace logitless::cuda
