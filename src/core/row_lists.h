#pragma once

// A row's sums and outputs as lists, which apply X to each entry. Structs, merges, workspaces, checks and the
// kernels whose code is the same for all entries iterate over them (docs/architecture.md, "How to add a row
// statistic").

// Sums over the columns, each made only if it is needed: X(name, part, kind, term).
//   name    tensor by which shards are merged (logitless/tensors.def): a sum of the logits themselves. A
//           problem needs the sum if it allows the tensor
//   part    member of RowStats and of the backends' partials. It is relative to the maximum or another logit
//           offset, as its kind says, so that no digits are lost to an offset that all logits have in common
//   kind    how it merges, a SumKind (row_stats.h)
//   term    a logit's addend to the part, for a logit z of class weight w, with d = z - logit_offset and
//           e = exp(d). q is the logit's weight as a target: 1 or 0 if a row has one target
#define LOGITLESS_OPTIONAL_SUMS(X)                             \
  X(sum_exp_logit, sum_offset, kExpOffset, e == 0 ? 0 : e * d) \
  X(weighted_logit_sum, weighted, kOffset, w* d)               \
  X(logit_sum, logit_sum, kPlain, z)                           \
  X(sum_sq_exp, sum_sq, kSquaredExp, e* e)

// All sums.
#define LOGITLESS_ROW_SUMS(X)                               \
  X(sum_exp, sum_exp, kExp, e)                              \
  X(target_logit, target_logit, kPlain, q == 0 ? 0 : q * z) \
  LOGITLESS_OPTIONAL_SUMS(X)

// Outputs of a row of a whole vocabulary: X(name, formula).
//   name     member of RowLoss, and tensor
//   formula  made from the statistics `stats`, log_sum = log sum_exp, the global id `target`, the sum q
//            of the targets' weights (1 if a row has one target), and max. If the maximum is +inf, max and
//            log_sum are NaN, so that all losses are NaN, as in PyTorch
// Two outputs are elsewhere: argmax is a member of RowStats, and lse_residual is the rounding error of lse.
#define LOGITLESS_ROW_OUTPUTS(X)                                                        \
  X(nll, (q * max - stats.target_logit) + q * log_sum) /* no digit lost to an offset */ \
  X(lse, max + log_sum)                                                                 \
  X(entropy, log_sum - stats.sum_offset / stats.sum_exp)                                \
  X(mean_logit, stats.logit_sum / params.vocab_total)                                   \
  X(log_sum_sq_probs, std::log(stats.sum_sq) - 2 * log_sum)                             \
  X(max_logit, stats.max)                                                               \
  X(is_top1, stats.argmax == target)

// Outputs whose upstream gradients a backward pass takes, as the tensor grad_name: X(name).
// row_coefficients() adds them to the coefficients of a row.
#define LOGITLESS_ROW_UPSTREAM(X) \
  X(nll)                          \
  X(lse)                          \
  X(entropy)                      \
  X(target_logit)
