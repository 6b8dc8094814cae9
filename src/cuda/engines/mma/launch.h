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

// What a launch decides from the problem and the device alone.
struct LogitsPlan {
  Instance instance;
  int stages = 0;
  Tiling tiling;     // workers are thread blocks, one a processor
  int partials = 0;  // of statistics, to be provided
};

// any_fewer: the launch has a row_count or row_block_active. Only args' sizes, dtype, epilogue, options and
// which pointers are null are read.
LogitsPlan plan_logits(const LogitsArgs& args, const Device& device, bool any_fewer);

// The fused product on the current device; see logits.h. Where the epilogue has statistics there are at least
// plan_logits().partials partials (of the same arguments). Of exp_logits and dz, rows past row_count are
// stored as 0 up to the end of their block of 128; blocks wholly past it are left as they are. Allocates
// nothing and does not wait.
void launch_logits(const LogitsArgs& args, const Queue& queue);
// The same as on a device that has no more than that one's processors, shared memory and L2.
void launch_logits(const LogitsArgs& args, const Device& device, const Queue& queue);

}  // namespace logitless::cuda::mma
