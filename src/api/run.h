#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "core/backend.h"

namespace logitless {

// What a context holds: which backend, which instruction set, whose threads.
struct Context {
  std::string backend;  // empty: choose by problem
  BackendOptions options;
};

// openmp_parallel_for.cpp. threads 0: as many as OpenMP gives now. Tasks are handed out in order, one at a
// time. After a fork, which OpenMP's threads may not survive, a loop runs on threads of its own.
ParallelFor openmp_parallel_for(int threads);

// backends.cpp: all backends of this build, in order of preference.
std::span<const Backend* const> all_backends();

// All CUDA devices, usable or not; tells why there is none.
std::vector<DeviceInfo> all_devices(std::string* why_none);

// The first usable backend that can run the problem; `name` (may be empty) restricts the choice to one.
const Backend& choose_backend(const std::string& name, const Problem& problem, const BackendOptions& options);

// Throws kBackendUnavailable when the name is unknown or the backend is not usable here.
const Backend& backend_by_name(const std::string& name, const BackendOptions& options);

// A problem that knows how it will be run.
struct PlannedProblem {
  Problem problem;
  const Backend* backend = nullptr;
  BackendOptions options;
  Plan plan;
};

// run.cpp: the spine, validate -> choose backend -> plan -> run.
std::vector<Plan> list_plans(const Context& context, const Problem& problem, const Backend** backend);
PlannedProblem make_plan(const Context& context, const Problem& problem);
// Throws for a context whose device is only a model.
void refuse_without_device(const BackendOptions& options);
// group: of a problem in a group, else null.
void run(const PlannedProblem& planned, const Buffers& buffers, void* workspace, size_t workspace_bytes,
         void* stream, const Communicator* group = nullptr);

}  // namespace logitless
