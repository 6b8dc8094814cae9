#pragma once
// The largest logits of rows, from a block of logits; one block of threads a row.
#include "cuda/engines/portable/row_kernels.cuh"
#include "cuda/run/top/selection.cuh"

namespace logitless::cuda::portable {

// After stats_kernel, which has left logits in the place of dot products.
template <class Real>
__global__ void __launch_bounds__(kRowThreads)
    top_kernel(RowParams<TopLogitsOf<Real>, Real> params, Tile<Real> tile) {
  const LogitsProductOf<Real>& product = params.product;
  const TopLogitsOf<Real>& top = params.args;
  using Selection = TopSelection<kRowThreads, Real>;
  __shared__ typename Selection::Shared shared;
  const int64_t row = tile.row + blockIdx.x;
  if (!row_exists(product, row)) return;
  const Real* z = tile.z + blockIdx.x * tile.stride;
  const auto first_column = static_cast<int32_t>(product.column_offset + tile.column);
  const int k = static_cast<int>(top.k);
  Selection selection(shared, k);
  join_to_best(selection, top.best + row * k, k, first_column == 0, tile.columns, [&](int64_t j) {
    return TopEntry<Real>{z[j], first_column + static_cast<int32_t>(j)};
  });
}

}  // namespace logitless::cuda::portable
