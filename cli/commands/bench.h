#pragma once
#include <cstdint>
#include <string>

namespace logitless::cli {

struct BenchShape {
  int64_t tokens = 0;
  int64_t vocab = 0;
  int64_t dim = 0;
};

// The mean loss by float32 logits in memory: a matrix product of oneDNN, opened at run time, softmax in
// place, and where there is room for gradients two products more.
double materialized_loss(const BenchShape& shape, const float* hidden, const float* weight,
                         const int32_t* targets, float* d_hidden, float* d_weight, int threads);
// Empty, or why that is not possible.
std::string why_not_materialized();
std::string materialized_by();  // "oneDNN 3.1.0"

}  // namespace logitless::cli
