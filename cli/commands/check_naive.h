#pragma once
#include "commands/check_cases.h"

namespace headroom::cli {

// The textbook computation in float32: all logits, their softmax and three matrix products, each sum taken in
// order, gradients rounded once to the dtype of their operand. Its distance from float64 is what a
// correct computation in this precision may have.
CheckOutputs naive_float32(const CheckCase& c, const CheckData& data);

}  // namespace headroom::cli
