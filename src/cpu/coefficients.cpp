#include <cmath>

#include "cpu/runner.h"

namespace headroom::cpu {
namespace {

// dz at the target from its own logit, in double: a p - g may cancel.
double target_gradient(const Runner& run, const HostLoss& loss, const RowCoefficients<double>& k, int64_t row,
                       double target_logit, double lse) {
  const Problem& p = run.problem;
  const double weight = row_weights(loss, row).target;
  double v = k.a * std::exp(target_logit - lse) + k.c * weight - k.g;
  if (p.softcap != 0) v *= 1 - (target_logit / p.softcap) * (target_logit / p.softcap);
  return v;
}

}  // namespace

void load_coefficients(const Runner& run, const HostLoss& loss, const Chunk& chunk) {
  const Problem& p = run.problem;
  const Arena& arena = run.arena;
  const bool from_buffers = !p.needs_forward();
  // Gradients of the dot products carry the logit scale; that of the bias is divided by it again.
  const double fold = p.scale != 0 ? p.scale : 1;
  for (int64_t i = 0; i < chunk.count; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t row = arena.rows[static_cast<size_t>(chunk.first + i)];
    double lse = 0;
    double entropy = 0;
    if (from_buffers) {
      lse = known_lse(loss, row);
      if (p.has_grad_entropy) entropy = load_as_double(run.buffers.entropy, p.stats_dtype(), row);
    } else {
      lse = log_sum_exp(arena.stats[at]);
    }
    const RowCoefficients<double> k = coefficients_of_row(loss, row, lse, entropy);
    arena.lse[at] = lse;
    arena.lse32[at] = static_cast<float>(lse);
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
