#pragma once
#include <functional>
#include <logitless/logitless.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "commands/context.h"

namespace logitless::cli {

struct BenchShape {
  int64_t tokens = 0;
  int64_t vocab = 0;
  int64_t dim = 0;
  std::string text() const;  // "1024 x 32768 x 512"
};

// One way to compute the loss (and gradients) of a shape.
struct BenchResult {
  std::string method;  // "materialized", or "logitless" with its budget
  bool gradients = false;
  std::string refusal;                 // why it did not run; else empty
  std::string detail;                  // plan and configuration
  std::optional<size_t> budget_bytes;  // 0: none; nothing: materialized
  std::optional<double> threshold;     // of thinned gradients
  int64_t workspace_bytes = 0;         // by the method's own account
  // Resident memory beyond inputs and outputs, measured; nothing on a device, where runs allocate none.
  std::optional<int64_t> peak_extra_bytes;
  std::vector<double> seconds;  // of each repeat
  double loss = 0;
  double median_seconds() const;
};

struct BenchRequest {
  BenchShape shape;
  logitless_dtype dtype = LOGITLESS_F32;
  std::vector<size_t> budgets;     // 0: none
  std::vector<double> thresholds;  // of thinned gradients, without a budget
  int repeats = 3;
};

// The methods in the order of the report, none of them run yet.
std::vector<BenchResult> bench_methods(const BenchRequest& request, bool materialized);

// All methods in turn, `repeats` times over, so that none has a better moment of the machine. Calls `step`
// after each run. On the host, workspaces and logits are allocated and released inside the time. On a CUDA
// device, without materialized logits, seconds are the device's own, each of a run that follows another on
// the stream, so that launches are not waited for; workspaces are allocated before.
std::vector<BenchResult> run_bench(const GlobalOptions& globals, const BenchRequest& request,
                                   const DeviceChoice& device,
                                   const std::function<void(const std::string&)>& step);

// The mean loss by float32 logits in memory: a matrix product of oneDNN, opened at run time, softmax in
// place, and where there is room for gradients two products more.
double materialized_loss(const BenchShape& shape, const float* hidden, const float* classifier,
                         const int32_t* targets, float* d_hidden, float* d_classifier, int threads);
// Empty, or why that is not possible.
std::string why_not_materialized();
std::string materialized_by();  // "oneDNN 3.1.0"

}  // namespace logitless::cli
