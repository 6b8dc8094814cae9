#pragma once
#include <cstdint>
#include <string>

namespace logitless::cli {

struct BenchShape {
  int64_t tokens = 0;
  int64_t vocab = 0;
  int64_t dim = 0;
};

// Reads "TOKENS,VOCAB,HIDDEN". Throws UsageError, which names --shape.
BenchShape parse_shape(const std::string& text);

// Returns the mean loss from float32 logits in memory. It uses a matrix product of oneDNN, opened at run
// time, and a softmax in place. If there is room for gradients, two more products make these.
double materialized_loss(const BenchShape& shape, const float* hidden, const float* weight,
                         const int32_t* targets, float* d_hidden, float* d_weight, int threads);
// Returns why that is not possible; empty if it is.
std::string why_not_materialized();
std::string materialized_by();  // "oneDNN 3.1.0"

}  // namespace logitless::cli
