#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "core/backend.h"

namespace logitless {

// What a context holds: which backend, which instruction set, whose threads.
struct Context {
  std::string backend;  // empty: choose by problem
  BackendOptions options;
};

// A problem that knows how it will be run.
struct PlannedProblem {
  Problem problem;
  const Backend* backend = nullptr;
  BackendOptions options;
  Plan plan;
};

// The spine: validate -> choose backend -> plan -> run.
std::vector<Plan> list_plans(const Context& context, const Problem& problem, const Backend** backend);
PlannedProblem make_plan(const Context& context, const Problem& problem);
// Throws for a context whose device is only a model.
void refuse_without_device(const BackendOptions& options);
// group: of a problem in a group, else null.
void run(const PlannedProblem& planned, const Buffers& buffers, void* workspace, size_t workspace_bytes,
         void* stream, const Communicator* group = nullptr);

}  // namespace logitless
