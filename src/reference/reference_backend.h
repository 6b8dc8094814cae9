#pragma once
#include "core/backend.h"

namespace headroom {

// Double precision, one scalar at a time: the oracle of the tests and of `headroom check`, and the backend of
// float64 problems. Every logit is computed up to four times; the workspace is two rows.
const Backend& reference_backend();

}  // namespace headroom
