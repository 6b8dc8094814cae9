#pragma once
#include "core/backend.h"

namespace logitless::reference {

// Double precision, one scalar at a time. It is the oracle of the tests and of `logitless check`, and the
// host's backend for float64 problems. Every logit is computed up to four times; the workspace is two rows.
const Backend& backend();

// The reference's Backend::candidates.
uint64_t candidates_bytes(const Candidates& candidates, const BackendOptions& options);
void candidates(const Candidates& candidates, const BackendOptions& options, Workspace workspace,
                void* stream);
// The reference's Backend::divergence.
void divergence(const Divergence& divergence, const BackendOptions& options, void* stream);

}  // namespace logitless::reference
