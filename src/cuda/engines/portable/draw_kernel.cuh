#pragma once
// The first draw of sparsified gradients (core/sparsification.h) from a block of dot products, and row sums
// relative to the lse estimate, which is the logit offset.
#include "core/sparsification.h"
#include "cuda/engines/portable/row_kernels.cuh"

namespace logitless::cuda::portable {

// A thread draws over its elements of the tile, a few at a time. It keeps each large q. It also keeps one of
// the others whenever their running sum passes the next multiple of the threshold; the sum starts at a random
// share of the threshold. Nearly always the sum of the few, which is needed anyway, shows that none is kept.
struct DrawElements {
  template <class Of>
  static __device__ void work(const Line<Of, float>& line, const DrawArgs& args) {
    const LogitsProduct& product = line.product;
    if (product.target != nullptr && product.target[line.row] == kIgnoredRow) return;
    const int64_t row = line.row;
    const Draws& draws = args.draws;
    const int64_t index = draws.row != nullptr ? draws.row[row] : row;
    const float threshold = draws.threshold[row], certain = draws.certain_share * threshold;
    const float low = draws.lse_estimate_residual != nullptr ? draws.lse_estimate_residual[index] : 0.0f;
    const int64_t first_column = product.column_offset + line.column;
    const uint32_t stream =
        kFirstDrawStream + draws.first_stream + static_cast<uint32_t>(first_column + line.lane() * kAtOnce);
    float running =
        threshold * (1 - draw_uniform(draw_bits(*draws.seed, static_cast<uint32_t>(index), stream)));
    float expected = 0;
    const float logit_offset = args.logit_offset[row];
    const LineSums<float> line_sums =
        sum_line(line, args, logit_offset, low, [&](int j, const float* z, const float* e, int count) {
          const float all = (e[0] + e[1]) + (e[2] + e[3]);  // at least each of them
          if (all < certain && running + all < threshold) {
            expected += all;
            running += all;
            return;
          }
          for (int i = 0; i < count; ++i) {
            const float q = e[i];
            const bool large = q >= certain;
            expected += large ? threshold : q;
            if (!large) running += q;
            const bool passed = running >= threshold;
            if (passed) running -= threshold;
            const auto column = static_cast<int32_t>(first_column + j + i);
            if (!(large || passed) || threshold == CUDART_INF_F || draws.role[column] >= 0) continue;
            const int32_t place = atomicAdd(draws.count + index, 1);
            if (place < draws.capacity - 1)
              draws.elements[index * draws.capacity + place] = {2 * column + large, z[i]};
          }
        });
    if (product.target != nullptr) line.store_target_logit(args.target_logit);
    const PartialStats& partials = args.stats;
    if (partials.sum == nullptr) return;
    expected = lanes_sum<Of::kLanes>(expected);
    if (line.lane() != 0) return;
    partials.expected[row] += expected;
    add_to_partial<Of>(partials, 0, row, logit_offset, line_sums, /*is_to_maximum=*/false);
  }
};

}  // namespace logitless::cuda::portable
