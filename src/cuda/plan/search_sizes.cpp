#include "cuda/plan/search_sizes.h"

#include <algorithm>

#include "cuda/plan/sizes.h"

namespace logitless::cuda {

std::vector<int64_t> token_chunks(int64_t tokens) {
  const int64_t all = std::max<int64_t>(tokens, 1);
  std::vector<int64_t> chunks;
  for (int64_t parts = 1; parts <= 64; parts = parts < 8 ? parts + 1 : parts * 2) {
    const int64_t rows = ceil_div(ceil_div(all, parts), 256) * 256;
    const int64_t chunk = parts == 1 ? all : std::min(all, rows);
    if (chunks.empty() || chunk < chunks.back()) chunks.push_back(chunk);
  }
  return chunks;
}

std::vector<ScratchBlock> scratch_blocks(const Problem& p, int64_t step) {
  const int64_t rows = std::max<int64_t>(p.tokens, 1);
  std::vector<ScratchBlock> blocks;
  for (const int64_t edge : {16384, 4096, 1024, 256, 64}) {
    const int64_t columns = p.batch_invariant ? ceil_div(edge, step) * step : edge;
    blocks.push_back({std::min<int64_t>(rows, edge / 4), std::min<int64_t>((p.vocab + 3) / 4 * 4, columns)});
  }
  return blocks;
}

}  // namespace logitless::cuda
