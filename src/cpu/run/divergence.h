#pragma once
#include "core/backend.h"

namespace logitless::cpu {

// As Backend::divergence, of float32.
void divergence(const Divergence& divergence, const BackendOptions& options, void* stream);

}  // namespace logitless::cpu
