#pragma once
#include <cstdint>
#include <vector>

#include "core/problem.h"

namespace logitless::cuda {

// Sizes of the parts that candidates cut a problem in.

// Rows that are worked on at once, the most first.
std::vector<int64_t> token_chunks(int64_t tokens);

// fp32 logits at once: larger blocks make faster products. step: with batch_invariant columns are multiples
// of it.
struct ScratchBlock {
  int64_t rows, columns;
};
std::vector<ScratchBlock> scratch_blocks(const Problem& problem, int64_t step);

}  // namespace logitless::cuda
