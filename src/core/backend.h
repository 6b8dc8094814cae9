#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/parallel.h"
#include "core/plan.h"
#include "core/problem.h"

namespace logitless {

struct Divergence;

inline constexpr int kHostMemory = -1;

// What a context asks of its backends.
struct BackendOptions {
  int device = kHostMemory;  // ordinal of the CUDA device whose memory the buffers are in
  std::string engine;        // by name; empty: the best of this machine
  ParallelFor parallel_for;
  // Plans are for a CUDA device of this model, which need not be here, and cannot run; empty: for `device`.
  std::string device_model;

  bool on_host() const { return device == kHostMemory && device_model.empty(); }
};

// A device whose memory buffers can be in. Versions as CUDA counts them: 13000 is 13.0.
struct DeviceInfo {
  std::string name;
  int compute_capability = 0;  // 90 for 9.0
  int processors = 0;
  uint64_t memory_bytes = 0;
  int driver_version = 0;
  int runtime_version = 0;
  int64_t cublaslt_version = 0;  // 0: not found
  std::string why_unavailable;   // empty when usable
};

// A backend is one row of this table; src/api/backends.cpp lists them in order of preference.
struct Backend {
  const char* name;
  bool device_memory;  // buffers and workspace are of BackendOptions::device, and a run is queued on a stream
  // Empty when usable on this machine, else why not.
  std::string (*why_unavailable)(const BackendOptions& options);
  // One line of facts about the device: processor, instruction sets, the one chosen.
  std::string (*describe)(const BackendOptions& options);
  // Empty when it can run the (already validated) problem, else why not.
  std::string (*why_unsupported)(const Problem& problem, const BackendOptions& options);
  // All plans worth choosing from that fit the budget (0: none), and always the one that needs least memory.
  // Allocates no workspace and touches no data.
  std::vector<Plan> (*plans)(const Problem& problem, const BackendOptions& options,
                             uint64_t max_workspace_bytes);
  // Every element *= *factor, but what is 0 stays 0; nothing is touched when that is 1. There is an array,
  // none is empty, and all are float64, as is then the factor (else float32), or none is.
  void (*scale)(std::span<const GradientArray> arrays, const void* factor, const BackendOptions& options,
                void* stream);
  // Rows of two heads; a float64 one on the host is the reference's.
  void (*divergence)(const Divergence& divergence, const BackendOptions& options, void* stream);
  // All devices, usable or not; tells why there is none. Null: the backend works on host memory.
  std::vector<DeviceInfo> (*devices)(std::string* why_none);
};

// Backend::scale of backends on host memory.
void scale_on_host(std::span<const GradientArray> arrays, const void* factor, const BackendOptions& options,
                   void* stream);

}  // namespace logitless
