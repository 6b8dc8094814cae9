#include "cpu/cpu_runner.h"

namespace headroom::cpu {
namespace {

// dz at the target from its own logit, in double: a p - g may cancel.
double target_gradient(const Runner& run, const HostLoss& loss, const RowCoefficients<double>& k, int64_t row,
                       double target_logit, const LogSumExp<double>& lse) {
  const double weight = row_weights(loss, row).target;
  const double slope =
      softcap_slope(run.problem, target_logit, inverse_temperature_of_row(run.problem, run.buffers, row));
  return dz_element(k, lse.log_p(target_logit), weight, true) * slope;
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
      if (p.has_grad_entropy) entropy = load_as_double(run.buffers.entropy, p.stats_dtype(), row);
    } else {
      lse = log_sum_exp_parts(arena.stats[at]);
    }
    const RowCoefficients<double> k = coefficients_of_row(loss, row, lse.value(), entropy);
    const FloatPair saved = split_to_floats(lse);
    arena.lse_high[at] = saved.high;
    arena.lse_low[at] = saved.low;
    arena.a[at] = static_cast<float>(fold * k.a);
    arena.b[at] = static_cast<float>(fold * k.b);
    arena.c[at] = static_cast<float>(fold * k.c);
    arena.g[at] = static_cast<float>(fold * k.g);
    if (!from_buffers) {
      const double z = arena.stats[at].target_logit;
      arena.target_gradient[at] = static_cast<float>(fold * target_gradient(run, loss, k, row, z, lse));
    }
  }
}

}  // namespace headroom::cpu
