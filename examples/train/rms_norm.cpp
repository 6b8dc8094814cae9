#include "train/rms_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace logitless::train {
namespace {

constexpr float kEpsilon = 1e-6F;
// Rows are summed in fixed blocks, so that the gradient of the gain has the same bits with any thread count.
constexpr int64_t kRowsPerBlock = 256;

}  // namespace

void rms_norm(int64_t rows, int64_t dim, const float* x, const float* gain, float* y, float* inverse_rms) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * dim;
    float* out = y + row * dim;
    float square = 0.0F;
#pragma omp simd reduction(+ : square)
    for (int64_t d = 0; d < dim; ++d) square += in[d] * in[d];
    const float inverse = 1.0F / std::sqrt(square / static_cast<float>(dim) + kEpsilon);
    inverse_rms[row] = inverse;
    for (int64_t d = 0; d < dim; ++d) out[d] = in[d] * inverse * gain[d];
  }
}

void rms_norm_backward(int64_t rows, int64_t dim, const float* x, const float* gain, const float* inverse_rms,
                       const float* d_y, float* d_x, float* d_gain) {
  const int64_t blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  std::vector<float> partial(static_cast<size_t>(blocks * dim), 0.0F);  // [blocks, dim]
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; ++block) {
    float* gain_sum = partial.data() + block * dim;
    const int64_t stop = std::min(rows, (block + 1) * kRowsPerBlock);
    for (int64_t row = block * kRowsPerBlock; row < stop; ++row) {
      const float* in = x + row * dim;
      const float* d_out = d_y + row * dim;
      float* d_in = d_x + row * dim;
      const float inverse = inverse_rms[row];
      float dot = 0.0F;  // sum_d d_y * gain * x
#pragma omp simd reduction(+ : dot)
      for (int64_t d = 0; d < dim; ++d) dot += d_out[d] * gain[d] * in[d];
      const float pull = dot * inverse * inverse / static_cast<float>(dim);
      for (int64_t d = 0; d < dim; ++d) {
        gain_sum[d] += d_out[d] * in[d] * inverse;
        d_in[d] += inverse * (d_out[d] * gain[d] - in[d] * pull);
      }
    }
  }
  std::fill(d_gain, d_gain + dim, 0.0F);
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t d = 0; d < dim; ++d) d_gain[d] += partial[static_cast<size_t>(block * dim + d)];
  }
}

}  // namespace logitless::train
