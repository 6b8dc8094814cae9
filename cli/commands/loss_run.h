#pragma once
#include <cstddef>
#include <cstdint>
#include <logitless/logitless.hpp>
#include <memory>
#include <string>
#include <vector>

#include "commands/context.h"
#include "commands/loss_inputs.h"
#include "commands/loss_options.h"
#include "commands/loss_stats.h"
#include "commands/thinning_options.h"
#include "options.h"

namespace logitless::cli {

// What to compute from the inputs.
struct LossRequest {
  LossOptions loss;
  DeviceChoice device;
  ThinningOptions thinning;
  bool sum = false;      // reduction: sum, else mean
  double num_items = 0;  // divisor of the mean; 0: the weights of the valid tokens
  LossStatFlags stats{};
  int64_t top_k = 0;
  bool grad_hidden = false;
  bool grad_classifier = false;
  bool grad_bias = false;
  bool grads_in_f32 = false;  // else each in the dtype of its operand
  int64_t ignore_index = -100;
  bool has_gradients() const { return grad_hidden || grad_classifier || grad_bias; }
};

struct Gradient {
  logitless_dtype dtype = LOGITLESS_F32;
  std::unique_ptr<Workspace> data;  // null when not asked for
};

// A statistic of kLossStats; empty when not asked for.
struct LossStatValues {
  std::vector<std::byte> values;  // of each token
  double mean = 0;                // over valid tokens
};

struct LossResult {
  double loss = 0;
  double mean_nll = 0;             // over valid tokens; NaN without any, as the other means
  int64_t correct_tokens = 0;      // 0 with several targets a token, of which none is the right one
  int64_t top_correct_tokens = 0;  // whose target is one of the top_k
  double seconds = 0;
  PlanInfo plan;             // of the first chunk
  int64_t chunk_tokens = 0;  // tokens that one run took
  size_t workspace_bytes = 0;
  // Of each token, in inputs.stats_dtype; ignored tokens hold 0 (argmax -1).
  std::vector<std::byte> token_loss;  // unreduced; empty with gradients
  std::vector<std::byte> nll;
  std::array<LossStatValues, kLossStats.size()> stats;
  std::vector<int64_t> argmax;
  std::vector<int64_t> top_ids;             // [tokens, top_k]; ignored tokens hold -1
  std::vector<std::byte> top_log_probs;     // [tokens, top_k]
  std::vector<std::byte> target_log_probs;  // [tokens, targets_per_token] of several targets
  Gradient d_hidden;
  Gradient d_classifier;
  Gradient d_bias;
};

// Without gradients the tokens run in chunks of about a second, so that progress can be shown; the chunks'
// sums are joined in double precision. With gradients it is one run.
LossResult run_loss(const GlobalOptions& globals, const LossInputs& inputs, const LossRequest& request);

}  // namespace logitless::cli
