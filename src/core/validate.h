#pragma once
#include "core/buffers.h"
#include "core/problem.h"

namespace logitless {

// The problem with its defaults filled in (vocab_total, sequence_length); throws Error on any nonsense.
Problem validated(Problem problem);

// Throws Error unless the buffers hold all that the problem needs; fills in default strides.
Buffers validated(const Problem& problem, Buffers buffers);

// Throws Error where the buffers hold what a run of the problem does not take or make.
void check_allowed(const Problem& problem, const Buffers& buffers);

}  // namespace logitless
