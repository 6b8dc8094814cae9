#pragma once
#include "core/backend.h"

namespace logitless {

// Double precision, one scalar at a time: the oracle of the tests and of `logitless check`, and the backend
// of float64 problems. Every logit is computed up to four times; the workspace is two rows.
const Backend& reference_backend();

}  // namespace logitless
