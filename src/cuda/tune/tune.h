#pragma once
#include "core/backend.h"
#include "cuda/plan/device_record.h"

namespace logitless::cuda {

// Times each engine of a device on heads with bf16 operands, writes the device record, and returns its text.
// Implements Backend::tune.
std::string tune(const TuneOptions& options);

}  // namespace logitless::cuda
