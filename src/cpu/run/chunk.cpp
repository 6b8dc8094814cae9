#include <algorithm>

#include "core/targets.h"
#include "cpu/run/stages.h"

namespace logitless::cpu {
namespace {

// The caller's row behind row i of the chunk.
int64_t source_row(const Runner& run, const Chunk& chunk, int64_t i) {
  return run.arena.rows[static_cast<size_t>(chunk.first + i)];
}

void load_row(const Runner& run, const Chunk& chunk, int64_t i) {
  const Problem& p = run.problem;
  const Shape& s = run.shape;
  const int64_t row = source_row(run, chunk, i);
  const auto* hidden = static_cast<const std::byte*>(run.buffers.hidden) +
                       row * run.buffers.hidden_stride * static_cast<int64_t>(size_of(p.dtype.hidden));
  run.kernels.convert_row({hidden, p.dtype.hidden, run.buffers.hidden_stride, p.compute_dtype}, p.hidden,
                          s.hidden_units * run.kernels.pair,
                          run.arena.hidden_rows.data() + i * s.hidden_stride);
  for (int64_t k = 0; k < run.targets(); ++k) {
    const int64_t target = target_of_row(p, run.buffers.targets, row, k);
    run.arena.target[static_cast<size_t>(i * run.targets() + k)] =
        is_here(p, target) ? target - p.vocab_start : -1;
  }
  if (p.has.temperature) {
    run.arena.inverse_temperature[static_cast<size_t>(i)] =
        static_cast<float>(inverse_temperature_of_row(p, run.buffers, row));
  }
}

}  // namespace

LoadStage::LoadStage(const Runner& run, const Chunk& chunk, TaskGroups& groups) : run_(run), chunk_(chunk) {
  const Problem& p = run.problem;
  const bool panels = p.needs_backward() && p.has.d_classifier && !p.is_thinned();
  rows_ = groups.add(row_tasks(chunk.count), {}, TaskBody::of<&LoadStage::load_rows>(*this));
  panels_ = groups.add(panels ? ceil_div(chunk.count, run.shape.token_block) : 0, {rows_},
                       TaskBody::of<&LoadStage::pack_panels>(*this));
}

void LoadStage::load_rows(int64_t, int64_t task, int) const {
  const int64_t end = std::min(chunk_.count, (task + 1) * kTaskRows);
  for (int64_t i = task * kTaskRows; i < end; ++i) load_row(run_, chunk_, i);
}

// Token blocks of [hidden_padded / nr, units, nr]: K of d_classifier runs along the tokens.
void LoadStage::pack_panels(int64_t, int64_t task, int) const {
  const Shape& s = run_.shape;
  const Kernels& k = run_.kernels;
  const int64_t first = task * s.token_block;
  const int64_t rows = std::min(s.token_block, chunk_.count - first);
  const MatrixView source{run_.arena.hidden_rows.data() + first * s.hidden_stride, element_dtype(k),
                          s.hidden_stride * k.pair};
  k.pack_interleaved(source, rows, run_.problem.hidden, ceil_div(rows, k.pair), s.hidden_padded / k.nr, k.nr,
                     run_.arena.hidden_panels.data() + first / k.pair * s.hidden_padded);
}

}  // namespace logitless::cpu
