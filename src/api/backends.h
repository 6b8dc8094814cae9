#pragma once
#include <span>
#include <string>
#include <vector>

#include "core/backend.h"

namespace logitless {

// All backends of this build, in order of preference.
std::span<const Backend* const> all_backends();

// All CUDA devices, usable or not; tells why there is none.
std::vector<DeviceInfo> all_devices(std::string* why_none);

// The first usable backend that can run the problem; `name` (may be empty) restricts the choice to one.
const Backend& choose_backend(const std::string& name, const Problem& problem, const BackendOptions& options);

// Throws kBackendUnavailable when the name is unknown or the backend is not usable here.
const Backend& backend_by_name(const std::string& name, const BackendOptions& options);

}  // namespace logitless
