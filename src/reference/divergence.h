#pragma once
#include "core/backend.h"

namespace logitless::reference {

// As Backend::divergence.
void divergence(const Divergence& divergence, const BackendOptions& options, void* stream);

}  // namespace logitless::reference
