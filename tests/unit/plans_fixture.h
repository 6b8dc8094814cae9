#pragma once
// What the tests of CUDA's plans have in common.
#include "cuda/plan/describe.h"
#include "cuda/run/bound_plan.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {

inline Device h200() {
  Device device;
  device.name = "H200";
  device.capability = 90;
  device.processors = 132;
  device.memory_bytes = size_t{139} << 30;
  return device;
}

inline const PlanDetail& detail_of(const Plan& plan) {
  return dynamic_cast<const CudaPlan&>(*plan.backend_plan).detail();
}

}  // namespace logitless::cuda
