#pragma once
#include "commands/check_cases.h"

namespace logitless::cli {

// The textbook computation in float32: all logits, their softmax and three matrix products, each sum taken in
// order, gradients rounded once to the dtype of their operand. Its distance from float64 is what a
// correct computation in this precision may have. rounds_dz: gradients of the logits are rounded to the
// operands' dtype, where both are 16-bit, before they are multiplied, as tensor cores need them.
CheckOutputs naive_float32(const CheckCase& c, const CheckData& data, bool rounds_dz);

}  // namespace logitless::cli
