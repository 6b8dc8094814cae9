#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace logitless::cli {

// A number that is applied to the logits.
struct LogitNumber {
  double value = 0;
  std::vector<std::pair<std::string, double>> from;  // entries that it is made of, as the file spells them
};

// What the config.json of a Hugging Face model says about its head. Where its language model has an object of
// its own (text_config and the like), that one's entries come before the outer ones.
struct ModelConfig {
  std::optional<int64_t> vocab;   // V
  std::optional<int64_t> hidden;  // D
  std::string dtype_key;          // "dtype" or "torch_dtype", whichever says it; empty where neither does
  std::string dtype;              // its value, such as bfloat16, or JSON where it is no text
  LogitNumber scale{1, {}};
  LogitNumber softcap;  // 0: none
};

// What the caller decides in the config's place, which is then not looked at.
struct ModelConfigOverrides {
  bool scale = false;
  bool softcap = false;
};

// Throws FileError for a file that cannot be read or understood, and for a number that changes the logits of
// this model type in a way that is not known here.
ModelConfig read_model_config(const std::string& file, const ModelConfigOverrides& overrides);

}  // namespace logitless::cli
