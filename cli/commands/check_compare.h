#pragma once
#include <string>
#include <vector>

#include "commands/check_cases.h"

namespace logitless::cli {

// One output of one run against float64: the 2-norm of the difference, and what it may be.
struct CheckedOutput {
  std::string name;
  double error = 0;
  double bound = 0;
  bool passed() const { return error <= bound; }  // false for a NaN
};

// The bound is twice the error of the naive float32 computation, plus a rounding unit of the largest numbers
// behind the output: of its dtype and the output itself, or of float32 and the numbers whose difference it
// is. The naive computation may be exact by luck where these cancel. argmax: rows that chose a smaller logit.
std::vector<CheckedOutput> compare(const CheckCase& c, const CheckData& data, const CheckOutputs& reference,
                                   const CheckOutputs& naive, const CheckOutputs& got);

}  // namespace logitless::cli
