#pragma once
#include <logitless/logitless.hpp>
#include <memory>

#include "device_memory.h"

namespace logitless::cli {

// Runs problems whose buffers are in host memory: there, or on a CUDA device through copies.
class Runner {
 public:
  // device: LOGITLESS_HOST_MEMORY or an ordinal, as the context's.
  Runner(const Context& context, int device);

  // Tight rows only. Outputs that the run leaves out are full of NaN on a device. A workspace is kept for the
  // next run.
  PlanInfo run(const Problem& problem, const Buffers& host);

 private:
  PlanInfo run_on_host(const Plan& plan, const Buffers& host);
  PlanInfo run_on_device(const Plan& plan, const Problem& problem, const Buffers& host);

  const Context& context_;
  std::unique_ptr<Workspace> workspace_;
  std::unique_ptr<CudaDevice> device_;    // null: on the host
  std::unique_ptr<DeviceMemory> memory_;  // copies and workspace
};

}  // namespace logitless::cli
