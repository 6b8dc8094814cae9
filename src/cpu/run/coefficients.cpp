#include "cpu/run/runner.h"

namespace logitless::cpu {
namespace {

// dz at the target from its own logit, in double: a p - g may cancel.
double target_gradient(const Runner& run, const HostLoss& loss, const RowCoefficients<double>& k, int64_t row,
                       double target_logit, double q, const LogSumExp<double>& lse) {
  const double weight = row_weights(loss, row).target;
  const double slope =
      softcap_slope(run.problem, target_logit, inverse_temperature_of_row(run.problem, run.buffers, row));
  return dz_element(k, lse.log_p(target_logit), weight, q) * slope;
}

// What is subtracted at the targets of the chunk's row i and, after a forward pass, dz there. Of a target
// that comes several times, each time all of it.
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

void load_coefficients(const Runner& run, const HostLoss& loss, const Chunk& chunk, int64_t row_begin,
                       int64_t row_end) {
  const Problem& p = run.problem;
  const Arena& arena = run.arena;
  const bool from_buffers = !p.needs_forward();
  // Gradients of the dot products carry the logit scale; that of the bias is divided by it again.
  const double fold = p.scale != 0 ? p.scale : 1;
  for (int64_t i = row_begin; i < row_end; ++i) {
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
    arena.lse_low[at] = saved.low;
    arena.a[at] = static_cast<float>(fold * k.a);
    arena.b[at] = static_cast<float>(fold * k.b);
    arena.c[at] = static_cast<float>(fold * k.c);
    load_targets(run, loss, k, i, row, lse, fold);
  }
}

}  // namespace logitless::cpu
