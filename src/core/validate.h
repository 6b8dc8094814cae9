#pragma once
#include "core/buffers.h"
#include "core/problem.h"

namespace logitless {

// Returns the problem with its defaults filled in (vocab_total, sequence_length). Throws Error if options
// contradict each other or are out of range.
Problem validated(Problem problem);

// Fills in default strides. Throws Error unless the buffers hold all that the problem needs.
Buffers validated(const Problem& problem, Buffers buffers);

// Throws Error if the buffers hold a tensor that a run of the problem neither takes nor makes.
void check_allowed(const Problem& problem, const Buffers& buffers);

}  // namespace logitless
