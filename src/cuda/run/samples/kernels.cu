#include "cuda/rows/device_rows.cuh"
#include "cuda/run/samples/samples.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    begin_samples_kernel(int64_t count, int64_t given_seed, Arena arena, SampleRows rows, Buffers in) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, r = i / count;
  if (r >= existing(rows.row_count, rows.rows)) return;
  const int64_t row = arena.row_map[rows.first + r];
  const bool has_own = in.sample_seed != nullptr;
  const auto* seeds = static_cast<const int64_t*>(has_own ? in.sample_seed : in.seed);
  const int64_t seed = seeds == nullptr ? given_seed : seeds[has_own ? row : 0];
  arena.sample_key[i] = sample_key(static_cast<uint64_t>(seed), has_own ? 0 : static_cast<uint64_t>(row),
                                   static_cast<uint64_t>(i % count));
  arena.sample_best[i] = 0;
}

// The logit is its key less the noise, which is off by half a unit in the key's last place.
__global__ void __launch_bounds__(kThreads)
    write_samples_kernel(int64_t count, uint32_t first_id, Arena arena, SampleRows rows, Buffers out) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, r = i / count;
  if (r >= existing(rows.row_count, rows.rows) || arena.target[rows.first + r] == kIgnoredRow) return;
  const uint64_t best = arena.sample_best[i];
  const uint32_t id = best != 0 ? column_of_packed(best) : first_id;  // all logits are -inf
  const float key = key_of_packed(best);
  const double z = double{key} - double{sample_noise(arena.sample_key[i], id)};
  const int64_t at = arena.row_map[rows.first + r] * count + i % count;
  if (out.sampled_ids != nullptr) out.sampled_ids[at] = id;
  store_if<float>(out.sampled_keys, at, key);
  store_if<float>(out.sampled_logits, at, z);
  store_if<float>(out.sampled_log_probs, at, (z - double{arena.lse[r]}) - double{arena.lse_residual[r]});
}

}  // namespace

void launch_begin_samples(const Problem& problem, const Arena& arena, const SampleRows& rows,
                          const Buffers& in, const Queue& queue) {
  const int64_t count = problem.num_samples;
  queue.launch("begin_samples", begin_samples_kernel, blocks_for(rows.rows * count, kThreads), kThreads, 0,
               count, problem.seed, arena, rows, in);
}

void launch_write_samples(const Problem& problem, const Arena& arena, const SampleRows& rows,
                          const Buffers& out, const Queue& queue) {
  const int64_t count = problem.num_samples;
  queue.launch("write_samples", write_samples_kernel, blocks_for(rows.rows * count, kThreads), kThreads, 0,
               count, static_cast<uint32_t>(problem.vocab_start), arena, rows, out);
}

}  // namespace logitless::cuda
