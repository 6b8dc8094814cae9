#include "train/cuda/layers.h"

#include "train/cuda/launch.cuh"

namespace logitless::train::cuda {
namespace {

constexpr float kEpsilon = 1e-6F;  // as in rms_norm.cpp
constexpr int kColumns = 32;       // of a block that sums columns
constexpr int kRowsAtOnce = kThreads / kColumns;

__global__ void embed_kernel(int64_t elements, int64_t dim, const int32_t* tokens, const float* table,
                             float* out) {
  for (int64_t i = first_element(); i < elements; i += stride_of_elements()) {
    out[i] = table[tokens[i / dim] * dim + i % dim];
  }
}

// A block a token.
__global__ void embed_backward_kernel(RowsOfTokens rows, int64_t dim, const float* d_out, float* d_table) {
  const int64_t token = blockIdx.x;
  const int32_t start = rows.starts[token], stop = rows.starts[token + 1];
  float* into = d_table + rows.ids[token] * dim;
  for (int64_t d = threadIdx.x; d < dim; d += kThreads) {
    float sum = 0.0F;
    for (int32_t place = start; place < stop; ++place) sum += d_out[rows.places[place] * dim + d];
    into[d] = sum;
  }
}

__global__ void fill_rows_kernel(int64_t elements, int64_t columns, const float* row, float* matrix) {
  for (int64_t i = first_element(); i < elements; i += stride_of_elements()) matrix[i] = row[i % columns];
}

// A block for kColumns columns: its threads take every kRowsAtOnce-th row, and their sums are added at the
// end.
__global__ void column_sums_kernel(int64_t rows, int64_t columns, const float* matrix, float* sums) {
  __shared__ float parts[kRowsAtOnce][kColumns];
  const int lane = static_cast<int>(threadIdx.x) % kColumns, part = static_cast<int>(threadIdx.x) / kColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + lane;
  float sum = 0.0F;
  if (column < columns) {
    for (int64_t row = part; row < rows; row += kRowsAtOnce) sum += matrix[row * columns + column];
  }
  parts[part][lane] = sum;
  __syncthreads();
  if (part > 0 || column >= columns) return;
  for (int other = 1; other < kRowsAtOnce; ++other) sum += parts[other][lane];
  sums[column] = sum;
}

// A block a row.
__global__ void rms_norm_kernel(int64_t dim, const float* x, const float* gain, float* y,
                                float* inverse_rms) {
  const int64_t row = blockIdx.x;
  const float* in = x + row * dim;
  float square = 0.0F;
  for (int64_t d = threadIdx.x; d < dim; d += kThreads) square += in[d] * in[d];
  const float inverse = 1.0F / sqrtf(block_sum(square) / static_cast<float>(dim) + kEpsilon);
  if (threadIdx.x == 0) inverse_rms[row] = inverse;
  for (int64_t d = threadIdx.x; d < dim; d += kThreads) y[row * dim + d] = in[d] * inverse * gain[d];
}

__global__ void rms_norm_backward_kernel(int64_t dim, const float* x, const float* gain,
                                         const float* inverse_rms, const float* d_y, float* d_x,
                                         float* d_gain_terms) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * dim;
  const float inverse = inverse_rms[blockIdx.x];
  float dot = 0.0F;  // sum_d d_y * gain * x
  for (int64_t d = threadIdx.x; d < dim; d += kThreads) dot += d_y[first + d] * gain[d] * x[first + d];
  const float pull = block_sum(dot) * inverse * inverse / static_cast<float>(dim);
  for (int64_t d = threadIdx.x; d < dim; d += kThreads) {
    const float in = x[first + d], d_out = d_y[first + d];
    d_x[first + d] += inverse * (d_out * gain[d] - in * pull);
    d_gain_terms[first + d] = d_out * in * inverse;
  }
}

__global__ void adamw_kernel(AdamWStep step, int64_t count, const float* gradient, float* first,
                             float* second, float* value) {
  for (int64_t i = first_element(); i < count; i += stride_of_elements()) {
    const float g = gradient[i];
    const float m = step.beta1 * first[i] + (1.0F - step.beta1) * g;
    const float v = step.beta2 * second[i] + (1.0F - step.beta2) * g * g;
    first[i] = m;
    second[i] = v;
    value[i] = step.shrink * value[i] - step.rate * m / (sqrtf(v * step.second_scale) + step.epsilon);
  }
}

// A block a row.
__global__ void softmax_kernel(int64_t rows, int64_t vocab, const int32_t* targets, bool gradient,
                               float* logits, double* losses) {
  float* z = logits + blockIdx.x * vocab;
  const int64_t target = targets[blockIdx.x];
  float largest = z[0];
  for (int64_t j = threadIdx.x; j < vocab; j += kThreads) largest = fmaxf(largest, z[j]);
  const float max = block_max(largest);
  float part = 0.0F;
  for (int64_t j = threadIdx.x; j < vocab; j += kThreads) part += expf(z[j] - max);
  const float sum = block_sum(part);
  if (threadIdx.x == 0) {
    losses[blockIdx.x] = log(static_cast<double>(sum)) + static_cast<double>(max - z[target]);
  }
  if (!gradient) return;
  __syncthreads();  // the target's logit has been read
  const auto scale = static_cast<float>(1.0 / (static_cast<double>(sum) * static_cast<double>(rows)));
  const float one = 1.0F / static_cast<float>(rows);
  for (int64_t j = threadIdx.x; j < vocab; j += kThreads) {
    z[j] = expf(z[j] - max) * scale - (j == target ? one : 0.0F);
  }
}

}  // namespace

void embed(int64_t rows, int64_t dim, const int32_t* tokens, const float* table, float* out,
           cudaStream_t stream) {
  launch("embed", embed_kernel, blocks_for(rows * dim), stream, rows * dim, dim, tokens, table, out);
}

void embed_backward(const RowsOfTokens& rows, int64_t dim, const float* d_out, float* d_table,
                    cudaStream_t stream) {
  launch("embed_backward", embed_backward_kernel, rows.count, stream, rows, dim, d_out, d_table);
}

void fill_rows(int64_t rows, int64_t columns, const float* row, float* matrix, cudaStream_t stream) {
  launch("fill_rows", fill_rows_kernel, blocks_for(rows * columns), stream, rows * columns, columns, row,
         matrix);
}

void column_sums(int64_t rows, int64_t columns, const float* matrix, float* sums, cudaStream_t stream) {
  launch("column_sums", column_sums_kernel, (columns + kColumns - 1) / kColumns, stream, rows, columns,
         matrix, sums);
}

void rms_norm(int64_t rows, int64_t dim, const float* x, const float* gain, float* y, float* inverse_rms,
              cudaStream_t stream) {
  launch("rms_norm", rms_norm_kernel, rows, stream, dim, x, gain, y, inverse_rms);
}

void rms_norm_backward(int64_t rows, int64_t dim, const float* x, const float* gain, const float* inverse_rms,
                       const float* d_y, float* d_x, float* d_gain_terms, cudaStream_t stream) {
  launch("rms_norm_backward", rms_norm_backward_kernel, rows, stream, dim, x, gain, inverse_rms, d_y, d_x,
         d_gain_terms);
}

void adamw(const AdamWStep& step, int64_t count, const float* gradient, float* first, float* second,
           float* value, cudaStream_t stream) {
  launch("adamw", adamw_kernel, blocks_for(count), stream, step, count, gradient, first, second, value);
}

void softmax(int64_t rows, int64_t vocab, const int32_t* targets, bool gradient, float* logits,
             double* losses, cudaStream_t stream) {
  launch("softmax", softmax_kernel, rows, stream, rows, vocab, targets, gradient, logits, losses);
}

}  // namespace logitless::train::cuda
