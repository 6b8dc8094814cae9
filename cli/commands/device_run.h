#pragma once
#include <headroom/headroom.hpp>
#include <memory>

#include "device_memory.h"

namespace headroom::cli {

// Runs problems whose buffers are in host memory: there, or on a CUDA device through copies.
class Runner {
 public:
  // device: HEADROOM_HOST_MEMORY or an ordinal, as the context's.
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

}  // namespace headroom::cli
