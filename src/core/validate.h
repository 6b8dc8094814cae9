#pragma once
#include "core/buffers.h"
#include "core/logit_transform.h"
#include "core/problem.h"

namespace logitless {

// Returns the problem with its defaults filled in (vocab_total, sequence_length). Throws Error if options
// contradict each other or are out of range.
Problem validated(Problem problem);

// Fills in default strides. Throws Error unless the buffers hold all that the problem needs.
Buffers validated(const Problem& problem, Buffers buffers);

// Throws Error if the buffers hold a tensor that a run of the problem neither takes nor makes.
void check_allowed(const Problem& problem, const Buffers& buffers);

// Checks the factors of logits, and divides them by the temperature of all rows. of_rows: rows have
// temperatures of their own. Throws Error.
LogitFactors checked_factors(const LogitFactors& factors, double temperature, bool of_rows,
                             DType hidden_dtype);
// Checks the dtype of a float tensor beside hidden states, and the dtype to which their operands are rounded.
// Throw Error.
void check_float(const char* argument, DType dtype, bool is_float64);
void check_compute_dtype(DType dtype, bool is_float64, bool may_be_fp8 = false);

}  // namespace logitless
