#pragma once
#include <array>
#include <logitless/logitless.hpp>
#include <string>
#include <vector>

#include "commands/options.h"
#include "io/tensor_files.h"

namespace logitless::cli {

// A statistic of each token that `logitless loss` makes where it is asked for, in the statistics' dtype but
// for is_top1, whose elements are 0 or 1. Reports and files have the tensor's name.
struct LossStat {
  logitless_tensor_id id;
  const char* help;
};
inline constexpr std::array kLossStats{
    LossStat{LOGITLESS_TENSOR_LSE, "Log of the sum of the exponentials too"},
    LossStat{LOGITLESS_TENSOR_ENTROPY, "Entropy of the prediction too"},
    LossStat{LOGITLESS_TENSOR_TARGET_LOGIT, "Logit of the target too"},
    LossStat{LOGITLESS_TENSOR_MEAN_LOGIT, "Mean of the logits too"},
    LossStat{LOGITLESS_TENSOR_LOG_SUM_SQ_PROBS, "Log of the sum of the squared probabilities too"},
    LossStat{LOGITLESS_TENSOR_MAX_LOGIT, "Largest logit too"},
    LossStat{LOGITLESS_TENSOR_IS_TOP1, "Whether the target has the largest logit, too"}};
inline constexpr size_t kStats = kLossStats.size();
inline constexpr size_t kIsTop1 = 6;

// Files and options of the command. Files are FILE[:TENSOR], empty where not given.
struct LossRequest {
  std::string hidden, weight, targets, target_weight, bias, class_weight, token_weight, token_temperature;
  Problem problem;  // options of the head
  std::string device = "cpu";
  std::string reduction = "mean";
  std::array<bool, kStats> stats{};
  std::string per_token;                  // file
  std::string gradients;                  // file
  std::vector<std::string> gradients_of;  // empty: of all operands
  std::string gradients_dtype = "same";
};

// Operands that fit together, ready for the library.
struct LossInputs {
  StoredTensor hidden;  // [..., D], read as it is needed
  StoredTensor weight;  // [V, D]
  StoredTensor bias;    // [V]; no file without one
  std::vector<std::byte> weight_data, bias_data;
  // [N], or [N, K] with targets_per_token; already shifted, ignore_index where a row has none.
  std::vector<int64_t> targets;
  int64_t targets_per_token = 0;  // K; 0: one, without a weight of its own
  // Elements of type `stats`; empty where not given.
  std::vector<std::byte> target_weight;      // [N, K], shifted as targets
  std::vector<std::byte> class_weight;       // [V]
  std::vector<std::byte> token_weight;       // [N]
  std::vector<std::byte> token_temperature;  // [N]
  std::vector<int64_t> batch_shape;          // hidden's shape without D
  int64_t tokens = 0;                        // N
  int64_t vocab = 0;                         // V
  int64_t dim = 0;                           // D
  int64_t valid_tokens = 0;                  // with a target that is not ignored
  double weight_sum = 0;                     // of the valid rows: token weight x class weight of the target
  ElementType stats = ElementType::kF32;     // of weights and of what is computed for each token
  std::vector<std::string> files;            // all that the operands come from
};

// Opens and checks everything; throws FileError naming tensor, expected and got.
LossInputs open_loss_inputs(const LossRequest& request);

}  // namespace logitless::cli
