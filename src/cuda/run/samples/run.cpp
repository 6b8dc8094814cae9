#include "cuda/run/samples/samples.h"

#include "cuda/plan/sizes.h"

namespace logitless::cuda {

void sum_rows_and_sample(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden,
                         const uint8_t* active) {
  const Problem& p = run.problem;
  launch_begin_samples(p, run.arena, {chunk.first, chunk.rows, chunk.row_count}, run.buffers, run.queue);
  for_windows(0, p.vocab, widest_window(run), [&](const Window& window) {
    const ConstMatrix weight = load_weight(run, window, {active, row_blocks(chunk.rows)});
    LogitsProduct product = logits_product(run, chunk, hidden, window, weight);
    product.row_block_active = active;
    apply_mask(run, chunk, product);
    SampleArgs args{row_sums(run, window)};
    args.samples = {p.num_samples, static_cast<uint32_t>(p.vocab_start), run.arena.sample_key,
                    run.arena.sample_best};
    launch_logits(run, {product, args});
  });
}

void write_samples(const Runner& run, const Chunk& chunk) {
  launch_write_samples(run.problem, run.arena, {chunk.first, chunk.rows, chunk.row_count}, run.buffers,
                       run.queue);
}

}  // namespace logitless::cuda
