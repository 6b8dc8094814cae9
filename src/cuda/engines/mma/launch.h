#pragma once
#include <cstdint>

#include "cuda/engines/fused/args.h"
#include "cuda/engines/logits.h"
#include "cuda/engines/mma/config.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {
class Queue;
}

namespace logitless::cuda::mma {

// The decisions of a launch that follow from the problem and the device alone.
struct LogitsPlan {
  Instance instance;
  int stages = 0;
  Tiling tiling;     // workers are thread blocks, one on each processor
  int partials = 0;  // of statistics, to be provided
};

// Plans a launch. any_fewer: it has a row_count or row_block_active. Reads only args' sizes, dtype, epilogue,
// options and which pointers are null.
LogitsPlan plan_logits(const LogitsArgs& args, const Device& device, bool any_fewer);

// Launches the fused product on the current device; see logits.h. If the epilogue has statistics, there must
// be at least plan_logits().partials partials (of the same arguments). In exp logits and dz, rows past
// row_count are stored as 0 up to the end of their block of 128. Blocks wholly past it stay unchanged.
// Allocates nothing and does not wait.
void launch_logits(const LogitsArgs& args, const Queue& queue);
// Launches as on a device with no more processors, shared memory and L2 than `device`.
void launch_logits(const LogitsArgs& args, const Device& device, const Queue& queue);

}  // namespace logitless::cuda::mma
