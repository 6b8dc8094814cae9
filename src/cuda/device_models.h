#pragma once
#include <string>

#include "cuda/device.h"

namespace headroom::cuda {

// A device of a model by its short name, such as "h200", for plans where there is none; null when the name is
// not known.
const Device* device_model(const std::string& name);

// "a100, h100, ..."
std::string known_models();

}  // namespace headroom::cuda
