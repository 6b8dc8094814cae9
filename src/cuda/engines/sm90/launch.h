#pragma once
#include <cstdint>

#include "cuda/engines/fused/args.h"
#include "cuda/engines/logits.h"
#include "cuda/engines/sm90/config.h"

namespace logitless::cuda {
class Queue;
}

namespace logitless::cuda::sm90 {

// What a launch decides from the problem and the device alone.
struct LogitsPlan {
  Instance instance;
  Tiling tiling;     // workers are clusters
  int partials = 0;  // of statistics, to be provided
};

// The tiles of a launch.
Config config_for(Epilogue epilogue, int64_t rows, int64_t depth);

// any_fewer: the launch has a row_count or row_block_active. Only args' sizes, dtype, epilogue, options and
// which pointers are null are read.
LogitsPlan plan_logits(const LogitsArgs& args, int processors, bool any_fewer);

// The fused product on the current device. Where the epilogue has statistics there are at least
// plan_logits().partials partials (of the same arguments). Of exp_logits and dz, rows past row_count are
// stored as 0 up to the end of their block of 128; blocks wholly past it are left as they are. Allocates
// nothing and does not wait.
void launch_logits(const LogitsArgs& args, const Queue& queue);

}  // namespace logitless::cuda::sm90
