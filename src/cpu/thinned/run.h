#pragma once
#include "core/host_loss.h"
#include "cpu/run/runner.h"

namespace logitless::cpu {

// A run of a thinned problem, from its rows on; the outputs of the forward pass begin as those of ignored
// rows.
void run_thinned(const Runner& run, const HostLoss& loss);

}  // namespace logitless::cpu
