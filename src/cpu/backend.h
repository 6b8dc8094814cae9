#pragma once
#include "core/backend.h"

namespace logitless {

// Vectorised kernels on the host's processor for fp32, bf16 and fp16.
const Backend& cpu_backend();

}  // namespace logitless
