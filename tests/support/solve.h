#pragma once
#include <cstdint>
#include <logitless/distributed.hpp>
#include <vector>

#include "case.h"

namespace logitless_test {

// Outputs of runs, by the names of tensors; empty where nothing was asked for. Scalars are vectors of one,
// draws 32-bit integers.
struct Outputs {
#define LOGITLESS_TENSOR(name, ...) std::vector<double> name;
#include <logitless/tensors.def>
  size_t workspace_bytes = 0;
};

// The problem of one pass of a case: the passes differ in which options they allow.
logitless::Problem pass_problem(const Case& c, logitless::Pass pass);

// Plans and runs one pass with every output it can have. The problem is pass_problem() or one that was
// changed after: its shard of the vocabulary, its budget. All memory is guarded, the workspace has exactly
// the planned size and is full of NaN, and outputs begin as NaN; anything written outside an output, or into
// an input, fails the test. On a device all of this holds of its copies of the memory. known: lse (and
// entropy, and draws) for a backward pass. group: of a problem with group_size.
// only_losses: of what a forward pass tells loss, lse and lse_low alone.
Outputs run_pass(const logitless::Context& context, const logitless::Problem& problem, const Case& c,
                 const Outputs* known = nullptr, const logitless::Communicator* group = nullptr,
                 bool only_losses = false);

// Runs the passes of the case's mode and returns the outputs of all.
Outputs solve(const logitless::Context& context, const Case& c, size_t max_workspace_bytes = 0);

// Bitwise the same, NaNs included.
bool same_bits(const std::vector<double>& a, const std::vector<double>& b);
// Names the first output that differs; empty when none does.
const char* first_difference(const Outputs& a, const Outputs& b);

}  // namespace logitless_test
