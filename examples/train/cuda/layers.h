#pragma once

// The model's layers on a device: what model.cpp, rms_norm.cpp and recurrence.cpp compute, a kernel each. All
// is queued on `stream`; every sum has an order of its own that no timing changes.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "train/recurrence.h"

namespace logitless::train::cuda {

// out [rows, dim] = rows of table [vocab, dim].
void embed(int64_t rows, int64_t dim, const int32_t* tokens, const float* table, float* out,
           cudaStream_t stream);

// Rows of a batch by their token: `places` [rows] has the rows of token ids[k] in [starts[k], starts[k + 1]),
// in ascending order.
struct RowsOfTokens {
  int64_t count;  // of different tokens
  const int32_t* ids;
  const int32_t* starts;
  const int32_t* places;
};
// Row ids[k] of d_table = the sum of its rows of d_out; other rows are left alone.
void embed_backward(const RowsOfTokens& rows, int64_t dim, const float* d_out, float* d_table,
                    cudaStream_t stream);

// matrix [rows, columns]: every row = row.
void fill_rows(int64_t rows, int64_t columns, const float* row, float* matrix, cudaStream_t stream);
// sums [columns] of matrix [rows, columns].
void column_sums(int64_t rows, int64_t columns, const float* matrix, float* sums, cudaStream_t stream);

// As train/rms_norm.h says.
void rms_norm(int64_t rows, int64_t dim, const float* x, const float* gain, float* y, float* inverse_rms,
              cudaStream_t stream);
// The same; the gain's gradient is the column sums of what is written to d_gain_terms [rows, dim], which may
// be d_y.
void rms_norm_backward(int64_t rows, int64_t dim, const float* x, const float* gain, const float* inverse_rms,
                       const float* d_y, float* d_x, float* d_gain_terms, cudaStream_t stream);

// As train/recurrence.h says.
void recurrence_forward(const RecurrenceShape& shape, float* projected, float* state, float* output,
                        cudaStream_t stream);
void recurrence_backward(const RecurrenceShape& shape, const float* projected, const float* state,
                         const float* d_output, float* d_projected, cudaStream_t stream);

// One step of train/adamw.h's AdamW for a parameter of `count` elements.
struct AdamWStep {
  float beta1, beta2, epsilon;
  float shrink;        // of the values: 1 - learning rate * weight decay
  float rate;          // learning rate / (1 - beta1^t)
  float second_scale;  // 1 / (1 - beta2^t)
};
void adamw(const AdamWStep& step, int64_t count, const float* gradient, float* first, float* second,
           float* value, cudaStream_t stream);

// Of logits [rows, vocab]: losses [rows] = -log softmax of the target; with `gradient` the logits become
// (softmax - onehot) / rows.
void softmax(int64_t rows, int64_t vocab, const int32_t* targets, bool gradient, float* logits,
             double* losses, cudaStream_t stream);

}  // namespace logitless::train::cuda
