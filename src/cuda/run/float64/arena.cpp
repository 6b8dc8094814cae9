#include "cuda/run/float64/arena.h"

#include <algorithm>

namespace logitless::cuda::float64 {

Arena lay_out(const Problem& p, const BlockSize& size, Workspace& w) {
  Arena a;
  a.scalars = w.take<Scalars>(1).data();
  a.target = w.take<int32_t>(p.tokens).data();
  if (p.targets_per_row > 0) {
    a.joined.target = w.take<int64_t>(p.tokens).data();
    a.joined.weight_sum = w.take<double>(p.tokens).data();
    a.target_logits = w.take<double>(p.tokens * p.targets_per_row).data();
  }
  if (p.needs_forward()) {
    a.stats = w.take<RowStats<double>>(p.tokens).data();
    a.row_loss = w.take<double>(p.tokens).data();
    if (p.top_k > 0) a.top = w.take<TopEntry<double>>(p.tokens * p.top_k).data();
  }
  if (p.needs_backward()) {
    a.gradients = w.take<RowGradient>(p.tokens).data();
    const int64_t rows = std::max(p.has.d_hidden ? size.rows : 0, p.has.d_classifier ? size.columns : 0);
    a.sums = w.take<double>(rows * p.hidden).data();
    if (p.has.d_bias) a.bias_sums = w.take<double>(size.columns).data();
  }
  a.block = w.take<double>(size.rows * size.columns).data();
  return a;
}

}  // namespace logitless::cuda::float64
