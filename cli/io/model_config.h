#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace logitless::cli {

// A number that the model applies to its logits.
struct LogitNumber {
  double value = 0;
  std::vector<std::pair<std::string, double>> from;  // entries that it is made of, as the file spells them
};

// Facts about the head in the config.json of a Hugging Face model. If its language model has an object of its
// own (text_config and the like), that object's entries come before the outer ones.
struct ModelConfig {
  std::optional<int64_t> vocab;   // V
  std::optional<int64_t> hidden;  // D
  std::string dtype_key;          // "dtype" or "torch_dtype", whichever the file has; empty if neither
  std::string dtype;              // value of dtype_key, such as bfloat16, or JSON if it is no text
  LogitNumber scale{1, {}};
  LogitNumber softcap;  // 0: none
};

// Facts that the caller sets itself; the config's entries are then not read.
struct ModelConfigOverrides {
  bool scale = false;
  bool softcap = false;
};

// Throws FileError if a file cannot be read or understood, and for a number that changes this model type's
// logits in an unknown way.
ModelConfig read_model_config(const std::string& file, const ModelConfigOverrides& overrides);

}  // namespace logitless::cli
