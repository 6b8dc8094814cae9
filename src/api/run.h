#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "core/backend.h"

namespace logitless {

// A context's choices: backend, engine, device and threads.
struct Context {
  std::string backend;  // empty: choose by problem
  BackendOptions options;
};

// openmp_parallel_for.cpp. threads 0: as many as OpenMP gives now. Tasks start in order, one at a time. After
// a fork, which OpenMP's threads may not survive, a loop runs on threads of its own.
ParallelFor openmp_parallel_for(int threads);

// backends.cpp. All backends of this build, in order of preference.
std::span<const Backend* const> all_backends();

// Lists all CUDA devices, usable or not, or writes why there is none.
std::vector<DeviceInfo> all_devices(std::string* why_none);

// Returns the first usable backend that can run the problem; `name`, if not empty, restricts the choice to
// one.
const Backend& choose_backend(const std::string& name, const Problem& problem, const BackendOptions& options);

// Measures a CUDA device (logitless_tune), and returns its record as JSON.
std::string tune(const TuneOptions& options);

// Returns a backend by its name. Throws kBackendUnavailable if the name is unknown or the backend is not
// usable here.
const Backend& backend_by_name(const std::string& name, const BackendOptions& options);

// A problem and how it will be run.
struct PlannedProblem {
  Problem problem;
  const Backend* backend = nullptr;
  BackendOptions options;
  Plan plan;
};

// run.cpp. All runs pass here: validate -> choose backend -> plan -> run.
std::vector<Plan> list_plans(const Context& context, const Problem& problem, const Backend** backend);
PlannedProblem make_plan(const Context& context, const Problem& problem);
// Returns the backend for arrays and rows that no plan was made for; all engines of a backend treat these
// alike.
const Backend& backend_of_rows(const Context& context, DType dtype);
// Logits at lists of columns, and their gradients (logitless/candidates.h).
uint64_t candidates_bytes(const Context& context, const Candidates& candidates);
void run_candidates(const Context& context, const Candidates& candidates, void* workspace,
                    size_t workspace_bytes, void* stream);
// Throws if there is a stream for buffers in host memory.
void check_stream(const BackendOptions& options, const void* stream);
// Throws if the context's device is only a model.
void refuse_without_device(const BackendOptions& options);
// group: not null if the problem is in a group.
void run(const PlannedProblem& planned, const Buffers& buffers, void* workspace, size_t workspace_bytes,
         void* stream, const Communicator* group = nullptr);

}  // namespace logitless
