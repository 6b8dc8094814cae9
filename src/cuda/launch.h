#pragma once

namespace logitless::cuda {

// How a kernel comes after what its stream holds.
enum class After {
  kAnything,
  kKernel,  // of the same run, on a device of compute capability 9.0 or more: they may overlap (launch.cuh)
};

}  // namespace logitless::cuda
