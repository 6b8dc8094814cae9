#pragma once
// Tiles of products for passes over two heads, within a budget of bytes (logitless/divergence.h).
#include <cstdint>

#include "core/dtype.h"
#include "core/problem.h"

namespace logitless {

// One head's operands.
struct DivergenceOperands {
  int64_t width = 1;
  DType hidden = DType::kF32;
  DType weight = DType::kF32;
  DType product = DType::kF32;  // dtype that products read: rows of others are copied into it
};

// logitless_divergence_problem, and where it runs.
struct DivergenceProblem {
  Pass pass = Pass::kForwardBackward;
  bool on_host = true;
  bool want_d_hidden = false, want_d_weight = false, want_d_bias = false;
  int64_t rows = 0;
  int64_t vocab = 1;
  int64_t ranks = 0;  // that exchange sums and terms
  DivergenceOperands student, teacher;
  DType rounded = DType::kF32;  // operands are rounded to it before they are copied; float32: they are not
  bool gathers_rows = false;
  int copied_biases = 0;
  uint64_t budget = 0;  // 0, kFastest: as much as is useful

  DType stats() const { return student.hidden == DType::kF64 ? DType::kF64 : DType::kF32; }
  bool wants_gradients() const { return want_d_hidden || want_d_weight || want_d_bias; }
};

// Tiles of values have all columns. Tiles of gradients have those of the window.
struct DivergenceTiles {
  int64_t rows = 0;         // 0: no such tiles
  int64_t window = 0;       // columns that are multiplied at one time
  int64_t hidden_sums = 0;  // rows of a buffer for sums of d_hidden; 0: sums are made in d_hidden
  int64_t weight_sums = 0;
  uint64_t bytes = 0;
};

struct DivergencePlan {
  DivergenceTiles values;
  DivergenceTiles gradients;
};

// Throws kBudgetTooSmall with the smallest budget that works. A forward pass needs a budget that is also
// enough for the gradients that are wanted later.
DivergencePlan plan_divergence(const DivergenceProblem& problem);

}  // namespace logitless
