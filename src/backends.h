#pragma once
#include <span>
#include <string>

#include "core/backend.h"

namespace headroom {

// All backends of this build, in order of preference.
std::span<const Backend* const> all_backends();

// The first usable backend that can run the problem; `name` (may be empty) restricts the choice to one.
const Backend& choose_backend(const std::string& name, const Problem& problem, const BackendOptions& options);

// Throws kBackendUnavailable when the name is unknown or the backend is not usable here.
const Backend& backend_by_name(const std::string& name, const BackendOptions& options);

}  // namespace headroom
