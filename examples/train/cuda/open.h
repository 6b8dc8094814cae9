#pragma once

// The demonstration on a CUDA device. Of every build: without nvcc without_cuda.cpp says that it is not
// there.

#include <memory>
#include <string>

#include "train/device.h"

namespace logitless::train {

// Empty, or why this build or machine has no device for the model; whether the library can use one of its
// devices is asked of the library.
std::string why_no_cuda();

// The device of this ordinal. Throws std::runtime_error with CUDA's words where it cannot be used.
std::unique_ptr<Device> make_cuda_device(int ordinal);

}  // namespace logitless::train
