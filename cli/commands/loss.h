#pragma once
#include <array>
#include <logitless/logitless.hpp>
#include <string>
#include <vector>

#include "commands/options.h"
#include "io/tensor_files.h"

namespace logitless::cli {

// An optional statistic of each token. It has the statistics' dtype, except is_top1, whose elements are 0 or
// 1. Reports and files use the tensor's name.
struct LossStat {
  logitless_tensor_id id;
  const char* help;
};
inline constexpr std::array kLossStats{
    LossStat{LOGITLESS_TENSOR_LSE, "Also output each token's log of the sum of exponentials"},
    LossStat{LOGITLESS_TENSOR_ENTROPY, "Also output the entropy of the prediction"},
    LossStat{LOGITLESS_TENSOR_TARGET_LOGIT, "Also output the logit of the target"},
    LossStat{LOGITLESS_TENSOR_MEAN_LOGIT, "Also output the mean of the logits"},
    LossStat{LOGITLESS_TENSOR_LOG_SUM_SQ_PROBS, "Also output the log of the sum of squared probabilities"},
    LossStat{LOGITLESS_TENSOR_MAX_LOGIT, "Also output the largest logit"},
    LossStat{LOGITLESS_TENSOR_IS_TOP1, "Also output whether the target has the largest logit"}};
inline constexpr size_t kStats = kLossStats.size();
inline constexpr size_t kIsTop1 = 6;

// Files and options of the command. Files are FILE[:TENSOR]; empty: not given.
struct LossRequest {
  std::string hidden, weight, targets, target_weight, bias, class_weight, token_weight, token_temperature;
  Problem problem;  // options of the head
  std::string device = "cpu";
  std::string reduction = "mean";
  std::array<bool, kStats> stats{};
  std::string per_token;                  // file name
  std::string gradients;                  // file name
  std::vector<std::string> gradients_of;  // empty: of all operands
  std::string gradients_dtype = "same";
};

// Operands that fit together, ready for the library.
struct LossInputs {
  StoredTensor hidden;  // [..., D], read in parts
  StoredTensor weight;  // [V, D]
  StoredTensor bias;    // [V]; no file: no bias
  std::vector<std::byte> weight_data, bias_data;
  // [N], or [N, K] with targets_per_token. Already shifted; ignore_index if a row has none.
  std::vector<int64_t> targets;
  int64_t targets_per_token = 0;  // K; 0: one target, without a weight of its own
  // Elements of type `stats`; empty: not given.
  std::vector<std::byte> target_weight;      // [N, K], shifted as targets
  std::vector<std::byte> class_weight;       // [V]
  std::vector<std::byte> token_weight;       // [N]
  std::vector<std::byte> token_temperature;  // [N]
  std::vector<int64_t> batch_shape;          // hidden's shape without D
  int64_t tokens = 0;                        // N
  int64_t vocab = 0;                         // V
  int64_t dim = 0;                           // D
  int64_t valid_tokens = 0;                  // tokens with a target that is not ignored
  double weight_sum = 0;  // sum over the valid rows of token weight x class weight of the target
  ElementType stats = ElementType::kF32;  // type of weights and of each token's results
  std::vector<std::string> files;         // all files that the operands come from
};

// Opens and checks everything. Throws FileError, which names the tensor, what was expected and what was got.
LossInputs open_loss_inputs(const LossRequest& request);

}  // namespace logitless::cli
