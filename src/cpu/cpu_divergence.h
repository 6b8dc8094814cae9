#pragma once
#include "core/backend.h"

namespace headroom::cpu {

// As Backend::divergence, of float32.
void divergence(const Divergence& divergence, const BackendOptions& options, void* stream);

}  // namespace headroom::cpu
