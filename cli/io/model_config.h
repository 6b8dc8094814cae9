#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace logitless::cli {

// A number of a config.json that is applied to the logits.
struct LogitTransform {
  std::string key;  // as the file spells it
  double value = 0;
};

// What the config.json of a Hugging Face model says about its head. Where its language model has an object of
// its own (text_config and the like), that one's entries come before the outer ones.
struct ModelConfig {
  std::string file;
  std::string model_type;         // of the language model; empty where it is not said
  std::optional<int64_t> vocab;   // V
  std::optional<int64_t> hidden;  // D
  std::optional<bool> tied;       // whether the head's weight is the embedding's
  std::string dtype_key;          // "dtype" or "torch_dtype", whichever says it; empty where neither does
  std::string dtype;              // its value, such as bfloat16, or JSON where it is no text
  double scale = 1;               // factor of the logits
  double softcap = 0;             // 0: none
  std::vector<LogitTransform> scale_from;
  std::vector<LogitTransform> softcap_from;
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
