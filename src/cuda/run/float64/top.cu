#include "core/top_k.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/run/float64/kernels.h"
#include "cuda/run/float64/logit.cuh"
#include "cuda/run/top/selection.cuh"
#include "cuda/runtime/check.h"

namespace logitless::cuda::float64 {
namespace {

constexpr int kThreads = 256;

// One block a row.
__global__ void __launch_bounds__(kThreads) top_kernel(Inputs in, Arena arena, Block block, int k) {
  using Selection = TopSelection<kThreads, double>;
  __shared__ Selection::Shared shared;
  const int64_t r = blockIdx.x, row = block.row + r;
  if (arena.target[row] == kIgnoredRow) return;
  const double* dots = block.data + r * block.stride;
  Selection selection(shared, k);
  join_to_best(selection, arena.top + row * k, k, block.column == 0, block.columns, [&](int64_t j) {
    return TopEntry<double>{logit(in, dots[j], row, block.column + j).z,
                            static_cast<int32_t>(block.column + j)};
  });
}

__global__ void __launch_bounds__(kThreads) write_top_kernel(Inputs in, Arena arena, Buffers out, int k) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x, row = at / k;
  if (row >= in.rows.tokens || arena.target[row] == kIgnoredRow) return;
  const TopEntry<double> entry = arena.top[at];
  if (out.top_ids != nullptr) out.top_ids[at] = in.rows.vocab_start + entry.column;
  put<double>(out.top_log_probs, at, log_sum_exp_parts(arena.stats[row]).log_p(entry.z));
}

}  // namespace

void launch_top(const Inputs& in, const Arena& arena, const Block& block, int64_t k, cudaStream_t stream) {
  Queue(stream).launch(top_kernel, static_cast<unsigned>(block.rows), kThreads, 0, in, arena, block,
                       static_cast<int>(k));
  check_launch("float64 top");
}

void launch_write_top(const Inputs& in, const Arena& arena, const Buffers& out, int64_t k,
                      cudaStream_t stream) {
  Queue(stream).launch(write_top_kernel, blocks_for(in.rows.tokens * k, kThreads), kThreads, 0, in, arena,
                       out, static_cast<int>(k));
  check_launch("float64 write_top");
}

}  // namespace logitless::cuda::float64
