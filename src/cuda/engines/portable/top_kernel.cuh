#pragma once
// The largest logits of rows, from a block of dot products, with one block of threads for each row.
#include "cuda/engines/portable/row_kernels.cuh"
#include "cuda/run/top/selection.cuh"

namespace logitless::cuda::portable {

template <class Real>
__global__ void __launch_bounds__(kRowThreads)
    top_kernel(RowParams<TopLogitsOf<Real>, Real> params, Tile<Real> tile) {
  const LogitsProductOf<Real>& product = params.product;
  const TopLogitsOf<Real>& top = params.args;
  using Selection = TopSelection<kRowThreads, Real>;
  __shared__ typename Selection::Shared shared;
  tile.strip = tile.columns;
  const Line<Instance<kRowThreads, false>, Real> line(product, tile, blockIdx.x, 0);
  if (!row_exists(product, line.row)) return;
  const auto first_column = static_cast<int32_t>(product.column_offset + tile.column);
  const int k = static_cast<int>(top.k);
  Selection selection(shared, k);
  join_to_best(selection, top.best + line.row * k, k, first_column == 0, tile.columns, [&](int64_t j) {
    return TopEntry<Real>{line.logit(static_cast<int>(j)), first_column + static_cast<int32_t>(j)};
  });
}

}  // namespace logitless::cuda::portable
