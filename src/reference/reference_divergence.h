#pragma once
#include "core/backend.h"

namespace headroom::reference {

// As Backend::divergence.
void divergence(const Divergence& divergence, const BackendOptions& options, void* stream);

}  // namespace headroom::reference
