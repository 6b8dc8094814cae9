#pragma once
// Samples of rows, from a block of dot products, with one block of threads for each row.
#include "cuda/engines/portable/row_kernels.cuh"

namespace logitless::cuda::portable {

__global__ void __launch_bounds__(kRowThreads) sample_kernel(RowParams<Samples> params, Tile<float> tile) {
  const LogitsProduct& product = params.product;
  const Samples& samples = params.args;
  tile.strip = tile.columns;
  const Line<Instance<kRowThreads, false>, float> line(product, tile, blockIdx.x, 0);
  if (!row_exists(product, line.row)) return;
  const auto first = samples.first_column + static_cast<uint32_t>(product.column_offset + line.column);
  for (int64_t s = 0; s < samples.count; ++s) {
    const int64_t at = line.row * samples.count + s;
    SampleRace race(samples.key[at], samples.best[at]);
    for (int j = static_cast<int>(threadIdx.x); j < line.columns; j += kRowThreads) {
      const float z = line.logit(j);
      const uint32_t column = first + static_cast<uint32_t>(j);
      if (race.may_win(z, column)) race.add(z, column);
    }
    const unsigned long long best =
        joined_lanes<kRowThreads>(static_cast<unsigned long long>(race.best),
                                  [](unsigned long long a, unsigned long long b) { return a > b ? a : b; });
    if (threadIdx.x == 0) samples.best[at] = best;
  }
}

}  // namespace logitless::cuda::portable
