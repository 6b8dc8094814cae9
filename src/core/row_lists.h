#pragma once

// What there is of a row, as lists: X is applied to each entry. Structs, merges, workspaces, checks and the
// kernels whose code is the same for all iterate over them (docs/architecture.md, "How to add a row
// statistic"). In expressions p is the Problem.

// Sums over the columns that are made where they are wanted: X(name, part, kind, wanted, option, term).
//   name    of the field of logitless_buffers that shards are merged by: a sum of the logits themselves
//   part    of RowStats and of the backends' statistics of tiles: relative to the maximum or another anchor,
//           as its kind says, so that no digits are lost to an offset that all logits have in common
//   kind    how it merges: of SumKind (row_stats.h)
//   wanted  whether a problem needs it; option: the same in messages, after "null"
//   term    what a logit z of class weight w adds to the part, with d = z - anchor and e = exp(d); q is its
//           weight as a target, 1 or 0 where a row has one
#define LOGITLESS_OPTIONAL_SUMS(X)                                                                    \
  X(sum_exp_logit, sum_offset, kExpOffset, p.want_entropy, "unless want_entropy", e == 0 ? 0 : e * d) \
  X(weighted_logit_sum, weighted, kOffset, p.label_smoothing > 0, "without label_smoothing", w * d)   \
  X(logit_sum, logit_sum, kPlain, p.want_mean_logit, "unless want_mean_logit", z)                     \
  X(sum_sq_exp, sum_sq, kSquaredExp, p.want_log_sum_sq_probs, "unless want_log_sum_sq_probs", e* e)

// All of them.
#define LOGITLESS_ROW_SUMS(X)                                         \
  X(sum_exp, sum_exp, kExp, true, "", e)                              \
  X(target_logit, target_logit, kPlain, true, "", q == 0 ? 0 : q * z) \
  LOGITLESS_OPTIONAL_SUMS(X)

// What is told of a row of a whole vocabulary: X(name, type, wanted, option, formula).
//   name     of RowLoss, and of the field of logitless_buffers
//   type     of the field's elements; void: stats
//   wanted   whether a problem may ask for it; option: the same in messages, after "null"
//   formula  from the statistics `stats`, log_sum = log sum_exp, the global id `target`, the sum q of the
//            targets' weights (1 where a row has one), and max; max and log_sum are NaN where the maximum is
//            +inf, so that with such a logit all losses are NaN, as in PyTorch
// (argmax is one of RowStats; lse_low is what storing lse takes off it.)
#define LOGITLESS_ROW_OUTPUTS(X)                                                                         \
  X(nll, void, true, "", (q * max - stats.target_logit) + q * log_sum) /* no digit lost to an offset */  \
  X(lse, void, true, "", max + log_sum)                                                                  \
  X(entropy, void, p.want_entropy, "unless want_entropy", log_sum - stats.sum_offset / stats.sum_exp)    \
  X(mean_logit, void, p.want_mean_logit, "unless want_mean_logit", stats.logit_sum / params.vocab_total) \
  X(log_sum_sq_probs, void, p.want_log_sum_sq_probs, "unless want_log_sum_sq_probs",                     \
    std::log(stats.sum_sq) - 2 * log_sum)                                                                \
  X(max_logit, void, true, "", stats.max)                                                                \
  X(is_top1, uint8_t, p.want_argmax, "unless want_argmax", stats.argmax == target)

// Flags of a problem that ask for some of them: X(name).
#define LOGITLESS_ROW_WANTS(X) \
  X(want_entropy)              \
  X(want_argmax)               \
  X(want_mean_logit)           \
  X(want_log_sum_sq_probs)

// Those whose upstream gradients a backward pass takes: X(name), of Problem::has_grad_name and
// Buffers::grad_name. What they do to the coefficients of a row is row_coefficients().
#define LOGITLESS_ROW_UPSTREAM(X) \
  X(nll)                          \
  X(lse)                          \
  X(entropy)                      \
  X(target_logit)
