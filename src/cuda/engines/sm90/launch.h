#pragma once
#include <cstdint>

#include "cuda/engines/fused/args.h"
#include "cuda/engines/logits.h"
#include "cuda/engines/sm90/config.h"

namespace logitless::cuda {
class Queue;
}

namespace logitless::cuda::sm90 {

// The decisions of a launch that follow from the problem and the device alone.
struct LogitsPlan {
  Instance instance;
  Tiling tiling;     // workers are clusters
  int partials = 0;  // of statistics, to be provided
};

// The tiles of a launch.
Config config_for(const LogitsArgs& args);

// Plans a launch. any_fewer: it has a row_count or row_block_active. Reads only args' sizes, dtype, epilogue,
// options and which pointers are null.
LogitsPlan plan_logits(const LogitsArgs& args, int processors, bool any_fewer);

// Launches the fused product on the current device. If the epilogue has statistics, there must be at least
// plan_logits().partials partials (of the same arguments). In exp logits and dz, rows past row_count are
// stored as 0 up to the end of their block of 128. Blocks wholly past it stay unchanged. Allocates nothing
// and does not wait.
void launch_logits(const LogitsArgs& args, const Queue& queue);

}  // namespace logitless::cuda::sm90
