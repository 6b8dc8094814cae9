#include "cuda/plan/describe.h"

#include "cuda/run/exact/arena.h"
#include "cuda/run/sparsified/arena.h"

namespace logitless::cuda {
namespace {

// Counts the products of the draw and of dense, frequent and sampled columns. The two row additions for each
// kept element are left out: they are bound by memory.
double cost_of_sparsified(const Problem& p) {
  const SparsifiedSizes s = sparsified_sizes(p);
  const double draw = p.pass == Pass::kBackward && p.has.saved ? 0 : 1;
  return draw + static_cast<double>(3 * s.dense + 2 * s.frequent + s.sampled) / static_cast<double>(p.vocab);
}

// Returns the cost in matmuls.
double cost_of(const Problem& p, const PlanDetail& d) {
  if (d.is_sparsified()) return cost_of_sparsified(p);
  double cost = p.needs_forward() ? 1 : 0;
  const bool lists = p.top_k > 0 && d.engine->traits().top_groups > 0;
  if (lists) cost += static_cast<double>(top_sizes(p, d).sampled) / static_cast<double>(p.vocab);
  if (!p.needs_backward()) return cost;
  cost += 1 - static_cast<double>(d.cached_columns) / static_cast<double>(p.vocab);
  return cost + (p.has.d_hidden ? 1 : 0) + (p.has.d_weight ? 1 : 0);
}

}  // namespace

PlanBytes bytes_of(const Problem& problem, const PlanDetail& detail) {
  Workspace workspace, saved, screen_weight;
  if (detail.is_sparsified()) {
    lay_out_sparsified(problem, detail, workspace, nullptr);
    if (problem.has.screen_weight && problem.tokens > 0) {
      const DType dtype = rounded_dtype(detail.engine->traits().has_e4m3);
      take_rounded_weight(problem, dtype, problem.vocab, screen_weight);
    }
    return {workspace.used(), problem.has.saved ? draws_bytes(problem) : 0, screen_weight.used()};
  }
  if (problem.stats_dtype() == DType::kF64) {
    lay_out_exact<double>(problem, detail, workspace, saved);
  } else {
    lay_out_exact<float>(problem, detail, workspace, saved);
  }
  return {workspace.used(), saved.used()};
}

Plan plan_of(const Problem& problem, const PlanDetail& detail) {
  Plan plan;
  plan.kind = detail.kind;
  plan.token_chunk = detail.token_chunk;
  plan.cached_columns = detail.cached_columns;
  plan.vocab_window = detail.vocab_window;
  plan.cost_matmuls = cost_of(problem, detail);
  return plan;
}

std::string description_of(const Problem& p, const PlanDetail& d) {
  static const char* const kSources[] = {"in place", "in d_hidden", "copied"};
  std::string text;
  if (d.scratch_rows > 0) {
    text += ", blocks " + std::to_string(d.scratch_rows) + "x" + std::to_string(d.scratch_columns);
  }
  text += ", rows " + std::string(kSources[static_cast<int>(d.source)]);
  if (d.copies_weight) text += ", weight copied";
  if (p.has_fp8_logits()) text += ", logits of e4m3 numbers";
  if (p.top_k > 0 && d.engine->traits().top_groups > 0) {
    text += ", lists of " + std::to_string(top_sizes(p, d).capacity);
  }
  if (d.rounds_between_chunks) text += ", d_weight rounded for each chunk";
  return text;
}

}  // namespace logitless::cuda
