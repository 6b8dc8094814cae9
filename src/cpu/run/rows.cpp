#include <algorithm>

#include "core/targets.h"
#include "cpu/sparsified/sparsified.h"

namespace logitless::cpu {
namespace {

void load_row(const Runner& run, const Chunk& chunk, const WorkerArena& w, int64_t i) {
  const Problem& p = run.problem;
  const Shape& s = run.shape;
  const int64_t row = run.arena.rows[static_cast<size_t>(chunk.first + i)];
  const MatrixView hidden = run.hidden_from(row);
  const auto convert = [&](const MatrixView& from, std::span<uint32_t> to) {
    run.kernels.convert_row(from, p.hidden, s.hidden_units * run.kernels.pair,
                            to.data() + i * s.hidden_stride);
  };
  convert(p.rounds_rows() ? rounded_rows(run, w, hidden, 1) : hidden, run.arena.hidden_rows);
  if (!run.arena.unrounded_rows.empty()) convert(hidden, run.arena.unrounded_rows);
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

// Packs a token block as [hidden_padded / nr, units, nr]: K of d_weight runs along the tokens.
void pack_token_block(const Runner& run, const Chunk& chunk, int64_t token_block) {
  const Shape& s = run.shape;
  const Kernels& k = run.kernels;
  const int64_t first = token_block * s.token_block;
  const int64_t rows = std::min(s.token_block, chunk.count - first);
  const auto from = run.arena.unrounded_rows.empty() ? run.arena.hidden_rows : run.arena.unrounded_rows;
  const MatrixView source{from.data() + first * s.hidden_stride, element_dtype(k), s.hidden_stride * k.pair};
  k.pack_interleaved(source, rows, run.problem.hidden, ceil_div(rows, k.pair), s.hidden_padded / k.nr, k.nr,
                     run.arena.hidden_panels.data() + first / k.pair * s.hidden_padded);
}

// Returns dz at the target from its own logit, in double: a p - g may cancel.
double target_gradient(const Runner& run, const HostLoss& loss, const RowCoefficients<double>& k, int64_t row,
                       double target_logit, double q, const LogSumExp<double>& lse) {
  const double weight = row_weights(loss, row).target;
  const double slope =
      softcap_slope(run.problem, target_logit, inverse_temperature_of_row(run.problem, run.buffers, row));
  return dz_element(k, lse.log_p(target_logit), weight, q) * slope;
}

// Writes what is subtracted at the targets of the chunk's row i and, after a forward pass, dz there. A target
// that comes several times gets the whole of it each time.
void load_targets(const Runner& run, const HostLoss& loss, const RowCoefficients<double>& k, int64_t i,
                  int64_t row, const LogSumExp<double>& lse, double fold) {
  const Problem& p = run.problem;
  for (int64_t t = 0; t < run.targets(); ++t) {
    const auto at = static_cast<size_t>(i * run.targets() + t);
    if (run.arena.target[at] < 0) continue;
    const int64_t id = p.vocab_start + run.arena.target[at];
    const double q = p.targets_per_row == 0 ? 1 : weight_as_target(p, run.buffers, row, id);
    run.arena.g[at] = static_cast<float>(fold * k.g * q);
    if (!p.needs_forward()) continue;
    const double z = run.arena.target_logit[at];
    run.arena.target_gradient[at] = static_cast<float>(fold * target_gradient(run, loss, k, row, z, q, lse));
  }
}

}  // namespace

Loaded load_chunk(const Runner& run, const Chunk& chunk, TaskGroups& groups) {
  const Problem& p = run.problem;
  const bool has_panels = p.needs_backward() && p.has.d_weight && !p.is_sparsified();
  Loaded loaded;
  loaded.rows = groups.add(chunk.row_tasks(), {}, [&run, &chunk](int64_t task, int worker) {
    const Range rows = chunk.rows(task);
    const WorkerArena w = run.worker(worker);
    for (int64_t i = rows.start; i < rows.end; ++i) load_row(run, chunk, w, i);
  });
  loaded.panels = groups.add(has_panels ? ceil_div(chunk.count, run.shape.token_block) : 0, {loaded.rows},
                             [&run, &chunk](int64_t task, int) { pack_token_block(run, chunk, task); });
  return loaded;
}

void load_coefficients(const Runner& run, const HostLoss& loss, const Chunk& chunk, const Range& rows) {
  const Problem& p = run.problem;
  const Arena& arena = run.arena;
  const bool from_buffers = !p.needs_forward();
  // Gradients of the dot products carry the logit scale; the bias' gradient is divided by it again.
  const double fold = p.scale != 0 ? p.scale : 1;
  for (int64_t i = rows.start; i < rows.end; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t row = arena.rows[static_cast<size_t>(chunk.first + i)];
    LogSumExp<double> lse;
    double entropy = 0;
    if (from_buffers) {
      lse = known_lse(loss, row);
      if (p.has.grad_entropy) entropy = load_as_double(run.buffers.entropy, p.stats_dtype(), row);
    } else {
      lse = log_sum_exp_parts(arena.stats[at]);
    }
    const RowCoefficients<double> k = coefficients_of_row(loss, row, lse.value(), entropy);
    const LogSumExp<float> saved = split_to<float>(lse);
    arena.lse_high[at] = saved.high;
    arena.lse_residual[at] = saved.low;
    arena.a[at] = static_cast<float>(fold * k.a);
    arena.b[at] = static_cast<float>(fold * k.b);
    arena.c[at] = static_cast<float>(fold * k.c);
    load_targets(run, loss, k, i, row, lse, fold);
  }
}

}  // namespace logitless::cpu
