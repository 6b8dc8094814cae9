#pragma once
#include <array>
#include <logitless/logitless.hpp>
#include <string>
#include <vector>

#include "commands/context.h"
#include "commands/options.h"
#include "commands/run.h"
#include "io/tensor.h"

namespace logitless::cli {

// A statistic of each token that `logitless loss` makes where it is asked for, in the statistics' dtype but
// for is_top1, whose elements are 0 or 1.
struct LossStat {
  const char* name;    // in reports and files
  const char* option;  // that asks for it
  const char* label;   // of its mean over the tokens that count
  const char* help;
  bool logitless::Problem::Has::*want;  // the tensor that a plan needs for it, or null
  RunTensor::SetPointer set;
};
inline constexpr size_t kStats = 7;
inline constexpr size_t kIsTop1 = 6;
extern const std::array<LossStat, kStats> kLossStats;

// Files and options of the command. Files are FILE[:TENSOR], empty where not given.
struct LossRequest {
  std::string hidden, classifier, targets, target_weight, bias, class_weight, token_weight, token_temperature;
  int64_t ignore_index = -100;
  int64_t shift = 0;
  int64_t sequence_length = 0;  // 0: the second to last dimension of hidden, all tokens if it has two
  LossOptions loss;
  std::string device = "cpu";
  std::string reduction = "mean";
  double num_items = 0;  // divisor of the mean; 0: the weights of the valid tokens
  std::array<bool, kStats> stats{};
  int64_t top_k = 0;
  std::string per_token;     // file
  std::string gradients;     // file
  std::string gradients_of;  // empty: of all operands
  std::string gradients_dtype = "same";
};

// Operands that fit together, ready for the library.
struct LossInputs {
  TensorView hidden;      // [..., D], mapped
  TensorView classifier;  // [V, D], mapped
  TensorView bias;        // [V], mapped; no data without one
  // [N], or [N, K] with targets_per_token; already shifted, ignore_index where a row has none.
  std::vector<int64_t> targets;
  int64_t targets_per_token = 0;  // K; 0: one, without a weight of its own
  // Elements of stats_dtype; empty where not given.
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
  logitless_dtype stats_dtype = LOGITLESS_F32;  // of weights and of what is computed for each token
  std::vector<std::string> files;               // all that the operands come from

  int64_t target_count() const { return targets_per_token == 0 ? 1 : targets_per_token; }  // of a token
  double stats_at(const std::byte* stats, int64_t index) const;  // an element of a vector of stats_dtype
};

// Opens and checks everything; throws FileError naming tensor, expected and got.
LossInputs open_loss_inputs(const LossRequest& request);

// An output of the run that may go into a file.
struct LossOutput {
  std::string name;
  ElementType type;
  std::vector<int64_t> shape;
  RunTensor::SetPointer set;
  Workspace values;
};

struct LossResult {
  double loss = 0;
  double mean_nll = 0;                      // over valid tokens; NaN without any, as the other means
  int64_t correct_tokens = 0;               // 0 with several targets a token, of which none is the right one
  int64_t top_correct_tokens = 0;           // whose target is one of the top_k
  std::array<double, kStats> stat_means{};  // of those that are asked for
  double seconds = 0;
  PlanInfo plan;             // of the first chunk
  int64_t chunk_tokens = 0;  // tokens that one run took
  size_t workspace_bytes = 0;
  std::vector<LossOutput> rows;  // of each token; ignored tokens hold 0 (argmax and top_ids -1)
  std::vector<LossOutput> gradients;
};

// Without gradients the tokens run in chunks of about a second, so that progress can be shown; the chunks'
// sums are joined in double precision. With gradients it is one run. wants_gradient: of hidden, classifier
// and bias.
LossResult run_loss(const GlobalOptions& globals, const DeviceChoice& device, const LossInputs& inputs,
                    const LossRequest& request, const std::array<bool, 3>& wants_gradient);

}  // namespace logitless::cli
