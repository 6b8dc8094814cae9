#pragma once
#include <cstddef>
#include <cstdint>
#include <logitless/logitless.hpp>
#include <optional>
#include <string>
#include <vector>

#include "io/tensor_view.h"

namespace logitless::cli {

// What the user names: FILE[:TENSOR] each, empty where not given.
struct LossFiles {
  std::string hidden;
  std::string classifier;
  std::string targets;
  std::string target_weight;
  std::string bias;
  std::string class_weight;
  std::string token_weight;
  std::string token_temperature;
  int64_t ignore_index = -100;
  int64_t shift = 0;
  int64_t sequence_length = 0;  // 0: the second to last dimension of hidden, all tokens if it has two
  std::optional<bool> tied;     // whether the classifier is the embedding, where that is known
};

// Operands that fit together, ready for the library.
struct LossInputs {
  TensorView hidden;      // [..., D], mapped
  TensorView classifier;  // [V, D], mapped
  TensorView bias;        // [V], mapped; no data without one
  // [N], or [N, K] with targets_per_token; already shifted, ignore_index where a row has none.
  std::vector<int64_t> targets;
  std::vector<std::byte> target_weight;      // [N, K] of stats_dtype, shifted as targets; empty without
  int64_t targets_per_token = 0;             // K; 0: one, without a weight of its own
  std::vector<std::byte> class_weight;       // [V] of stats_dtype; empty without
  std::vector<std::byte> token_weight;       // [N] of stats_dtype; empty without
  std::vector<std::byte> token_temperature;  // [N] of stats_dtype; empty without
  std::vector<int64_t> batch_shape;          // hidden's shape without D
  int64_t tokens = 0;                        // N
  int64_t vocab = 0;                         // V
  int64_t dim = 0;                           // D
  int64_t valid_tokens = 0;                  // with a target that is not ignored
  double weight_sum = 0;                     // of the valid rows: token weight x class weight of the target
  logitless_dtype stats_dtype = LOGITLESS_F32;  // of weights and of what is computed for each token
  std::vector<std::string> files;               // all that the operands come from

  int64_t target_count() const { return targets_per_token == 0 ? 1 : targets_per_token; }  // of a token
};

// Opens and checks everything; throws FileError naming tensor, expected and got.
LossInputs open_loss_inputs(const LossFiles& files);

// An element of a vector of stats_dtype.
double stats_at(const std::vector<std::byte>& stats, logitless_dtype dtype, int64_t index);

}  // namespace logitless::cli
