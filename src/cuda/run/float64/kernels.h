#pragma once
// Kernels of problems in float64. Every launcher only queues; pointers are of the device.
#include <cuda_runtime_api.h>

#include "core/buffers.h"
#include "core/problem.h"
#include "cuda/rows/rows.h"
#include "cuda/run/float64/arena.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda::float64 {

// What the kernels need to know of the problem.
struct Inputs {
  RowInputs rows;               // without its pointers to weights, which are to floats
  const double* class_weight;   // [vocab_total] or null
  const double* token_weight;   // [tokens] or null
  const double* target_weight;  // [tokens, targets_per_row] or null: ones
  const double* num_items;      // in place of the problem's, or null
  const double* bias;           // [vocab] or null
  const double* temperature;    // [tokens] or null
  double bias_scale;
  LogitTransform<double> transform;  // without pointers
  WantedSums sums;
};
Inputs inputs_of(const Problem& problem, const Buffers& buffers, const Arena& arena);

// The logits of rows [row, row + rows) and columns [column, column + columns) of the shard.
struct Block {
  int64_t row, rows;
  int64_t column, columns;
  double* data;  // [rows, stride]
  int64_t stride;
};

// ---- float64_rows.cu
void launch_prepare_rows(const Inputs& in, const Arena& arena, const Buffers& out, cudaStream_t stream);
// Outputs of every row, from its statistics; ignored rows get theirs.
void launch_finish_rows(const Inputs& in, const Arena& arena, const Buffers& out, bool is_shard,
                        cudaStream_t stream);
// Ids and log-probabilities of the largest logits.
void launch_write_top(const Inputs& in, const Arena& arena, const Buffers& out, int64_t k,
                      cudaStream_t stream);
// The reduced loss and correct_count.
void launch_finish_loss(const Inputs& in, const Arena& arena, const Buffers& out, cudaStream_t stream);
// Where the gradients begin. Vectors of [N] or null, but for loss: a scalar with any reduction of it.
struct Upstream {
  const double* lse;      // known from an earlier forward pass; null: from the statistics
  const double* lse_low;  // the same, to be added; null: 0
  const double* entropy;  // the same; only with grad_entropy
  const double* grad_loss;
#define LOGITLESS_MEMBER(name) const double* grad_##name;
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
};
void launch_row_gradients(const Inputs& in, const Arena& arena, const Upstream& upstream,
                          cudaStream_t stream);

// ---- float64_logits.cu
// From dot products: joins the block's columns to the rows' statistics, which its first column begins.
void launch_stats(const Inputs& in, const Arena& arena, const Block& block, cudaStream_t stream);
// From dot products: joins the block's columns to the rows' largest logits, as above.
void launch_top(const Inputs& in, const Arena& arena, const Block& block, int64_t k, cudaStream_t stream);
// From dot products to dz, in place; 0 in rows that are ignored.
void launch_dz(const Inputs& in, const Arena& arena, const Block& block, cudaStream_t stream);

// ---- float64_product.cu
// A factor of a product by its strides: over the rows (columns) of the result, and over what is summed.
struct Factor {
  const double* data;
  int64_t stride, k_stride;
};
// c [m, n] = (adds ? c : 0) + sum_k (scale * a[., k]) * b[., k], k after k: to go on with a sum gives the
// bits of the whole sum.
struct Product {
  int64_t m, n, k;
  Factor a, b;
  double scale;
  const int32_t* k_target;  // [k] or null: those of kIgnoredRow are left out
  double* c;
  int64_t c_stride;
  bool adds;
};
void launch_product(const Product& p, cudaStream_t stream);

// ---- float64_gradients.cu
// sums[j] += sum_r dz[r, j], row after row
void launch_column_sums(const Block& dz, double* sums, cudaStream_t stream);
// rows of `to` = (accumulate ? to : 0) + factor * those of `from`
struct StoreRows {
  const double* from;  // [rows, columns]
  int64_t rows, columns;
  const int32_t* target;  // [rows] or null: rows of kIgnoredRow have a gradient of 0
  double* to;
  int64_t stride;
  bool accumulate;
  double factor = 1;
};
void launch_store_rows(const StoreRows& s, cudaStream_t stream);

}  // namespace logitless::cuda::float64
