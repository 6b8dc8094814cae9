#pragma once

// What there is of a row, as lists: X is applied to each entry. Structs, merges, workspaces, checks and the
// kernels whose code is the same for all iterate over them (docs/architecture.md, "How to add a row
// statistic").

// Sums over the columns that are made where they are wanted: X(name, part, kind, term).
//   name    of the tensor (logitless/tensors.def) that shards are merged by: a sum of the logits themselves.
//   A
//           problem needs it where it allows the tensor
//   part    of RowStats and of the backends' statistics of tiles: relative to the maximum or another
//   logit_offset,
//           as its kind says, so that no digits are lost to an offset that all logits have in common
//   kind    how it merges: of SumKind (row_stats.h)
//   term    what a logit z of class weight w adds to the part, with d = z - logit_offset and e = exp(d); q is
//   its
//           weight as a target, 1 or 0 where a row has one
#define LOGITLESS_OPTIONAL_SUMS(X)                             \
  X(sum_exp_logit, sum_offset, kExpOffset, e == 0 ? 0 : e * d) \
  X(weighted_logit_sum, weighted, kOffset, w* d)               \
  X(logit_sum, logit_sum, kPlain, z)                           \
  X(sum_sq_exp, sum_sq, kSquaredExp, e* e)

// All of them.
#define LOGITLESS_ROW_SUMS(X)                               \
  X(sum_exp, sum_exp, kExp, e)                              \
  X(target_logit, target_logit, kPlain, q == 0 ? 0 : q * z) \
  LOGITLESS_OPTIONAL_SUMS(X)

// Outputs of a row of a whole vocabulary: X(name, formula).
//   name     of RowLoss, and of the tensor
//   formula  from the statistics `stats`, log_sum = log sum_exp, the global id `target`, the sum q of the
//            targets' weights (1 where a row has one), and max; max and log_sum are NaN where the maximum is
//            +inf, so that with such a logit all losses are NaN, as in PyTorch
// (argmax is one of RowStats; lse_residual is what storing lse takes off it.)
#define LOGITLESS_ROW_OUTPUTS(X)                                                        \
  X(nll, (q * max - stats.target_logit) + q * log_sum) /* no digit lost to an offset */ \
  X(lse, max + log_sum)                                                                 \
  X(entropy, log_sum - stats.sum_offset / stats.sum_exp)                                \
  X(mean_logit, stats.logit_sum / params.vocab_total)                                   \
  X(log_sum_sq_probs, std::log(stats.sum_sq) - 2 * log_sum)                             \
  X(max_logit, stats.max)                                                               \
  X(is_top1, stats.argmax == target)

// Those whose upstream gradients a backward pass takes: X(name), of the tensor grad_name. What they do to the
// coefficients of a row is row_coefficients().
#define LOGITLESS_ROW_UPSTREAM(X) \
  X(nll)                          \
  X(lse)                          \
  X(entropy)                      \
  X(target_logit)
