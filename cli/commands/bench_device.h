#pragma once
#include <functional>
#include <string>
#include <vector>

#include "commands/bench_run.h"
#include "commands/context.h"

namespace logitless::cli {

// As run_bench(), on a CUDA device and without materialized logits: seconds are the device's own, each of a
// run that follows another on the stream, so that launches are not waited for. Workspaces are allocated
// before.
std::vector<BenchResult> run_device_bench(const GlobalOptions& globals, const BenchRequest& request,
                                          const DeviceChoice& device,
                                          const std::function<void(const std::string&)>& step);

}  // namespace logitless::cli
