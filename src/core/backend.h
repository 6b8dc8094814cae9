#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/parallel.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/workspace.h"

namespace logitless {

struct Candidates;
struct Divergence;
struct NoiseLists;

inline constexpr int kHostMemory = -1;

// A context's choices for its backends.
struct BackendOptions {
  int device = kHostMemory;  // ordinal of the CUDA device that has the buffers in its memory
  std::string engine;        // set of kernels by its name; empty: the best of this machine
  ParallelFor parallel_for;
  // Model of CUDA device to plan for; it may be elsewhere, so its plans cannot run. Empty: plans are for
  // `device`.
  std::string device_model;

  bool on_host() const { return device == kHostMemory && device_model.empty(); }
};

// A device whose memory can hold the buffers. Versions as CUDA counts them: 13000 is 13.0.
struct DeviceInfo {
  std::string name;
  int compute_capability = 0;  // 90 for 9.0
  int processors = 0;
  uint64_t memory_bytes = 0;
  int driver_version = 0;
  int runtime_version = 0;
  int64_t cublaslt_version = 0;  // 0: there is none
  std::string why_unavailable;   // empty when usable
  std::string record;            // file of its record, or "built in"; empty: none
};

struct TuneHead {
  int64_t tokens = 0, vocab = 0, hidden = 0;
};

// logitless_tune_options, and the library's version for the record.
struct TuneOptions {
  int device = 0;
  std::vector<TuneHead> heads;
  double seconds = 0;
  std::string path;
  std::function<bool(double)> progress;  // called with the share of the time; false stops. May be empty
  std::string library_version;
};

// A backend is one row of this table; src/api/backends.cpp lists them in order of preference.
struct Backend {
  const char* name;
  bool device_memory;  // buffers and workspace are in BackendOptions::device's memory; a run is queued on a
                       // stream
  // Empty if usable on this machine, else the reason.
  std::string (*why_unavailable)(const BackendOptions& options);
  // Describes the device in one line: processor, instruction sets, chosen engine.
  std::string (*describe)(const BackendOptions& options);
  // Empty if it can run the (already validated) problem, else the reason.
  std::string (*why_unsupported)(const Problem& problem, const BackendOptions& options);
  // Returns all plans within the budget (0: none) that are worth choosing from, and always the one that needs
  // the least memory. Allocates no workspace and touches no data.
  std::vector<Plan> (*plans)(const Problem& problem, const BackendOptions& options,
                             uint64_t max_workspace_bytes);
  // Multiplies every element by *factor; a 0 stays 0. Touches nothing if *factor is 1. There is at least one
  // array, and none is empty. Either all arrays are float64, and so is the factor, or none is, and the factor
  // is float32.
  void (*scale)(std::span<const GradientArray> arrays, const void* factor, const BackendOptions& options,
                void* stream);
  // Runs a stage for the rows of two heads. On the host, float64 rows run in the reference backend.
  void (*divergence)(const Divergence& divergence, const BackendOptions& options, void* stream);
  // Bytes of workspace for a stage of candidates, and the stage. On the host, float64 runs in the reference
  // backend, and the lists have been checked.
  uint64_t (*candidates_bytes)(const Candidates& candidates, const BackendOptions& options);
  void (*candidates)(const Candidates& candidates, const BackendOptions& options, Workspace workspace,
                     void* stream);
  // Makes the noise of lists with at least one id.
  void (*noise)(const NoiseLists& lists, const BackendOptions& options, void* stream);
  // Lists all devices, usable or not, or writes why there is none. Null: the backend works on host memory.
  std::vector<DeviceInfo> (*devices)(std::string* why_none);
  // Measures a device's engines, writes the device record and returns its text. Null if devices is.
  std::string (*tune)(const TuneOptions& options) = nullptr;
};

// Backend::scale for backends on host memory.
void scale_on_host(std::span<const GradientArray> arrays, const void* factor, const BackendOptions& options,
                   void* stream);
// Backend::noise for such backends.
void noise_on_host(const NoiseLists& lists, const BackendOptions& options, void* stream);

}  // namespace logitless
